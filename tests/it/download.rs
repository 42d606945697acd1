//! Downloads from servers that misbehave: what is kept is always the whole file, and what is said names the mirror.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpt::data::card::{Card, Remote};
use gpt::data::download::{Patience, fetch};
use gpt::data::place::Place as Folder;
use gpt::data::progress::{Progress, Told};
use gpt::error::{Error, Result};
use sha2::{Digest, Sha256};

use crate::command::Place;
use crate::server::{Answer, Asked, Server};

const PATIENCE: Patience = Patience { silence: Duration::from_millis(400), pause: Duration::from_millis(5) };

/// A file that is no text, of a few blocks.
fn file() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn card(mirrors: &[String]) -> Card {
    let list = mirrors.iter().map(|m| format!("\"{m}\"")).collect::<Vec<_>>().join(", ");
    let text = format!(
        "name = \"set\"\ntitle = \"t\"\nlicence = \"l\"\n[[file]]\nname = \"a.bin\"\nmirrors = [{list}]\n\
         bytes = {}\nsha256 = \"{}\"\n",
        file().len(),
        sha256(&file())
    );
    Card::parse(&text, Path::new("set.toml")).unwrap()
}

struct Cache(tempfile::TempDir);

impl Cache {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn fetch(&self, card: &Card) -> Result<PathBuf> {
        self.fetch_as(card, &card.file[0], false, &mut Told::default())
    }

    fn fetch_as(&self, card: &Card, remote: &Remote, offline: bool, notes: &mut dyn Progress) -> Result<PathBuf> {
        fetch(card, remote, &Folder::new(self.0.path()), offline, PATIENCE, notes)
    }

    /// The names in the set's folder, without the lock.
    fn names(&self) -> Vec<String> {
        let folder = self.0.path().join("downloads/set");
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .map(|entries| entries.flatten().map(|e| e.file_name().into_string().unwrap()).collect())
            .unwrap_or_default();
        names.retain(|name| !name.ends_with(".lock"));
        names.sort();
        names
    }
}

/// A server whose only answer is `bad` until it was asked `times`, then the file, and what is kept after that.
fn recovers(bad: impl Fn(&Asked) -> Answer + Send + Sync + 'static, times: usize) -> Server {
    let server = Server::start(move |asked, before| match before < times {
        true => bad(asked),
        false => Answer::part(&file(), asked).with("ETag: \"one\""),
    });
    let cache = Cache::new();
    let path = cache.fetch(&card(&[format!("{}/a.bin", server.address)])).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), file());
    assert_eq!(cache.names(), ["a.bin", "a.bin.sha256"]);
    server
}

/// What is said when every answer is `bad`; nothing is kept under the file's name, and another mirror has the file.
fn refused(bad: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> String {
    let server = Server::start(move |asked, _| bad(asked));
    let good = Server::start(|asked, _| Answer::part(&file(), asked));
    let (bad, good) = (format!("{}/a.bin", server.address), format!("{}/a.bin", good.address));
    let cache = Cache::new();
    let error = cache.fetch(&card(std::slice::from_ref(&bad))).unwrap_err();
    let said = error.to_string();
    assert!(said.contains(&bad) && said.contains("a.bin of set") && error.hint().is_some(), "{said}");
    assert!(!cache.names().contains(&"a.bin".to_owned()), "{:?}", cache.names());
    let mut notes = Told::default();
    let both = card(&[bad.clone(), good]);
    let path = cache.fetch_as(&both, &both.file[0], false, &mut notes).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), file());
    assert!(notes.0.iter().any(|note| note.contains(&bad)), "the mirror that failed is told: {:?}", notes.0);
    said
}

#[test]
fn a_file_is_fetched_once_and_held_to_what_it_was() {
    let server = Server::start(|asked, _| Answer::part(&file(), asked));
    let cache = Cache::new();
    let card = card(&[format!("{}/a.bin", server.address)]);
    let path = cache.fetch(&card).unwrap();
    assert_eq!(cache.fetch(&card).unwrap(), path);
    assert_eq!(server.asked().len(), 1);
    let agent = server.asked()[0].header("user-agent").unwrap().to_owned();
    assert!(agent.contains("Mozilla") && agent.contains("gpt/"), "some mirrors refuse an unknown agent: {agent}");
    std::fs::write(&path, "damaged").unwrap();
    let error = cache.fetch(&card).unwrap_err();
    assert!(error.to_string().contains("sha256") && error.hint().unwrap().contains("remove it"), "{error}");
    std::fs::remove_file(&path).unwrap();
    cache.fetch(&card).unwrap();
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn a_checksum_that_nobody_knows_is_that_of_the_first_download() {
    let server = Server::start(|_, before| Answer::ok(if before == 0 { b"first" } else { b"other" }));
    let cache = Cache::new();
    let mut card = card(&[format!("{}/a.bin", server.address)]);
    (card.file[0].sha256, card.file[0].bytes) = (None, None);
    let path = cache.fetch(&card).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"first");
    std::fs::remove_file(&path).unwrap();
    let said = cache.fetch(&card).unwrap_err().to_string();
    assert!(said.contains("another file than at the first download") && said.contains("a.bin.sha256"), "{said}");
}

#[test]
fn refusals_name_the_mirror_and_the_next_one_is_taken() {
    assert!(refused(|_| Answer::status(403)).contains("403"));
    assert!(refused(|_| Answer::status(404)).contains("404"));
    let looped = refused(|asked| Answer::status(301).with(&format!("Location: {}", asked.path)));
    assert!(looped.contains("redirect"), "{looped}");
    let nowhere = refused(|_| Answer::status(301).with("Location: http://127.0.0.1:1/a.bin"));
    assert!(nowhere.contains("error sending request"), "{nowhere}");
}

#[test]
fn pages_and_pointers_are_never_kept_as_data() {
    let page = b"<!DOCTYPE html><title>Sign in</title>";
    assert!(refused(|_| Answer::ok(page).with("Content-Type: text/html; charset=utf-8")).contains("HTML"));
    // Without saying so, at the length that was expected.
    let filled = || [b"  <HTML>".to_vec(), vec![b' '; file().len() - 8]].concat();
    assert!(refused(move |_| Answer::ok(&filled())).contains("HTML"));
    let pointer = || [b"version https://git-lfs.github.com/spec/v1\n".to_vec(), vec![b' '; file().len() - 43]].concat();
    assert!(refused(move |_| Answer::ok(&pointer())).contains("git-lfs"));
}

#[test]
fn wrong_lengths_and_wrong_contents_are_refused() {
    assert!(refused(|_| Answer::ok(&file()[1..])).contains("299999 bytes, not 300000"));
    assert!(
        refused(|_| Answer { length: Some(None), ..Answer::ok(&[file(), vec![0]].concat()) }).contains("more than")
    );
    let short = refused(|_| Answer { length: Some(None), ..Answer::ok(&file()[1..]) });
    assert!(short.contains("ended after 299999 of 300000"), "{short}");
    let other = refused(|_| Answer::ok(&vec![7; file().len()]));
    assert!(other.contains("sha256"), "{other}");
}

#[test]
fn broken_transfers_go_on_where_they_broke_off() {
    // Cut in the middle: the rest is asked for, of the same version.
    let server =
        recovers(|asked| Answer { cut: Some(100_000), ..Answer::part(&file(), asked) }.with("ETag: \"one\""), 1);
    let second = &server.asked()[1];
    assert_eq!((second.from(), second.header("if-range")), (Some(100_000), Some("\"one\"")));
    // Several times.
    let server =
        recovers(|asked| Answer { cut: Some(70_000), ..Answer::part(&file(), asked) }.with("ETag: \"one\""), 3);
    let from: Vec<_> = server.asked().iter().map(Asked::from).collect();
    assert_eq!(from, [None, Some(70_000), Some(140_000), Some(210_000)]);
    // Without a version nothing can be gone on with.
    let server = recovers(|asked| Answer { cut: Some(100_000), ..Answer::part(&file(), asked) }, 1);
    assert_eq!(server.asked()[1].from(), None);
    // Only a weak version, but a date.
    let dated = |asked: &Asked| {
        let answer = Answer { cut: Some(10), ..Answer::part(&file(), asked) }.with("ETag: W/\"one\"");
        answer.with("Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT")
    };
    let server = recovers(dated, 1);
    assert_eq!(server.asked()[1].header("if-range"), Some("Mon, 30 Nov 2026 00:00:00 GMT"));
}

#[test]
fn a_server_without_ranges_or_with_another_version_sends_all_of_it_again() {
    let whole = |_: &Asked| Answer::ok(&file()).with("ETag: \"one\"");
    let server = Server::start(move |asked, before| match before {
        0 => Answer { cut: Some(1000), ..whole(asked) },
        _ => whole(asked),
    });
    let cache = Cache::new();
    let path = cache.fetch(&card(&[format!("{}/a.bin", server.address)])).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), file());
    // A part that is not the one that was asked for.
    recovers(
        |asked| match asked.from() {
            None => Answer { cut: Some(1000), ..Answer::ok(&file()) }.with("ETag: \"one\""),
            Some(_) => Answer { status: 206, ..Answer::ok(&file()[5..]) }.with("Content-Range: bytes 5-299999/300000"),
        },
        2,
    );
    // What was fetched before is longer than the file is now.
    recovers(
        |asked| match asked.from() {
            None => Answer { cut: Some(1000), ..Answer::ok(&file()) }.with("ETag: \"one\""),
            Some(_) => Answer::status(416),
        },
        2,
    );
}

#[test]
fn servers_that_stall_fail_for_a_while_or_are_slow_are_waited_for() {
    let stalled = |asked: &Asked| {
        let answer = Answer { cut: Some(5), stall: Some(Duration::from_secs(3)), ..Answer::part(&file(), asked) };
        answer.with("ETag: \"one\"")
    };
    let server = recovers(stalled, 1);
    assert_eq!(server.asked()[1].from(), Some(5));
    recovers(|_| Answer::status(503), 2);
    // Slower than a whole transfer may be silent, but never silent for so long.
    let slow = Answer { cut: Some(150_000), stall: Some(Duration::from_millis(250)), ..Answer::ok(&file()) };
    recovers(move |_| slow.clone(), 1);
    assert!(
        refused(|_| Answer { cut: Some(0), stall: Some(Duration::from_secs(3)), ..Answer::ok(&file()) })
            .contains("attempts")
    );
}

#[test]
fn offline_asks_nobody() {
    let server = Server::start(|asked, _| Answer::part(&file(), asked));
    let (cache, card) = (Cache::new(), card(&[format!("{}/a.bin", server.address)]));
    let error = cache.fetch_as(&card, &card.file[0], true, &mut Told::default()).unwrap_err();
    assert!(error.hint().unwrap().contains("gpt data fetch set"), "{error}");
    assert_eq!(server.asked().len(), 0);
    cache.fetch(&card).unwrap();
    cache.fetch_as(&card, &card.file[0], true, &mut Told::default()).unwrap();
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn proxies_are_those_of_the_environment() {
    let proxy = Server::start(|_, _| Answer::ok(b"through the proxy, a text that is long enough"));
    let place = Place::new();
    let card = "name = \"set\"\ntitle = \"t\"\nlicence = \"l\"\n[[file]]\nname = \"a.txt\"\n\
                mirrors = [\"http://mirror.example/a.txt\"]\n";
    place.file("set.toml", card);
    let args = ["data", "fetch", "set.toml"];
    place.run_with(&args, &[("http_proxy", &proxy.address), ("no_proxy", "")]).ok();
    assert_eq!(proxy.asked()[0].path, "http://mirror.example/a.txt");
}

#[test]
fn two_processes_fetch_one_file_once() {
    let answer = Answer { cut: Some(1), stall: Some(Duration::from_millis(200)), ..Answer::ok(&file()) };
    let server = Server::start(move |_, _| answer.clone());
    let (cache, card) = (Cache::new(), card(&[format!("{}/a.bin", server.address)]));
    std::thread::scope(|scope| {
        let fetches: Vec<_> = (0..4).map(|_| scope.spawn(|| cache.fetch(&card).unwrap())).collect();
        fetches.into_iter().for_each(|fetch| assert_eq!(std::fs::read(fetch.join().unwrap()).unwrap(), file()));
    });
    assert_eq!(server.asked().len(), 1);
}

/// Ctrl-C after some bytes.
struct Stops(u32);

impl Progress for Stops {
    fn begin(&mut self, _: &str, _: Option<u64>) {}
    fn at(&mut self, _: u64) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 { Err(Error::failed("stopped")) } else { Ok(()) }
    }
    fn end(&mut self) {}
    fn note(&mut self, _: String) {}
}

#[test]
fn an_interrupted_download_goes_on_the_next_time() {
    let server = Server::start(|asked, _| Answer::part(&file(), asked).with("ETag: \"one\""));
    let (cache, card) = (Cache::new(), card(&[format!("{}/a.bin", server.address)]));
    assert!(cache.fetch_as(&card, &card.file[0], false, &mut Stops(3)).is_err());
    assert_eq!(cache.names(), ["a.bin.part", "a.bin.part.json"]);
    let path = cache.fetch(&card).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), file());
    assert!(server.asked()[1].from().is_some_and(|from| from > 0));
}
