//! Fetching the files of a card: mirrors in order, broken transfers resumed, what arrives checked. Called by `data`.
//!
//! Next to `<cache>/downloads/<set>/<file>` lie `<file>.sha256` (what it is held to), and while it is fetched `<file>.part`
//! and `<file>.part.json`. Nothing gets its name before it is whole and checked.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use reqwest::StatusCode;
use reqwest::blocking::{Client, Response};
use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, LAST_MODIFIED, RANGE};
use serde::{Deserialize, Serialize};

use super::card::{Card, Remote};
use super::place::{Claim, Place};
use super::progress::Progress;
use crate::error::{Error, Result};
use crate::files::atomic;

/// Some servers refuse the names that HTTP libraries give themselves.
const USER_AGENT: &str = concat!("Mozilla/5.0 (compatible; gpt/", env!("CARGO_PKG_VERSION"), ")");

/// Attempts at one mirror; each goes on where the last one broke off.
const ATTEMPTS: u32 = 6;

/// How long to wait for servers.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For a connection, an answer, or the next bytes of one.
    pub silence: Duration,
    /// Before the second attempt; doubled each time.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { silence: Duration::from_secs(30), pause: Duration::from_millis(500) }
    }
}

/// What a file was when it was checked.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Checked {
    sha256: String,
    bytes: u64,
    /// When it was written, in nanoseconds: a file that changed is checked again.
    changed: u64,
}

/// A transfer that was broken off.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Begun {
    url: String,
    /// The server's name for this version of the file; without one it cannot be gone on with.
    version: Option<String>,
}

/// The path of a card's file, fetched if it is not there. `offline` never asks a server.
pub fn fetch(
    card: &Card,
    remote: &Remote,
    place: &Place,
    offline: bool,
    patience: Patience,
    progress: &mut dyn Progress,
) -> Result<PathBuf> {
    let path = path_of(card, remote, place);
    if is_checked(&path, remote)? {
        return Ok(path);
    }
    if offline {
        return Err(Error::failed(format!("{} of {} was not fetched yet", remote.name, card.name))
            .with_hint(format!("run `gpt data fetch {}` once without --offline", card.name)));
    }
    place.folder("downloads")?;
    place.folder(&format!("downloads/{}", card.name))?;
    let _claim = Claim::take(&path, progress)?;
    // The one that was waited for may have fetched it.
    if is_checked(&path, remote)? {
        return Ok(path);
    }
    let transfer = Transfer { path: &path, remote, client: client(patience)?, patience };
    let mut failures = Vec::new();
    for mirror in &remote.mirrors {
        match transfer.from(mirror, progress) {
            Ok(()) => {
                failures.into_iter().for_each(|failure| progress.note(failure));
                return Ok(path);
            }
            Err(Failure::Mirror(what)) => failures.push(format!("{mirror}: {what}")),
            Err(Failure::Own(e)) => return Err(e),
        }
    }
    let what = format!("no mirror has {} of {}:\n  {}", remote.name, card.name, failures.join("\n  "));
    Err(Error::failed(what).with_hint(format!(
        "try again later (what has arrived is kept), or put the file at {} yourself",
        path.display()
    )))
}

/// Where a card's file is kept.
fn path_of(card: &Card, remote: &Remote, place: &Place) -> PathBuf {
    place.path().join("downloads").join(&card.name).join(&remote.name)
}

/// Whether a file is fetched, without looking into it.
pub fn is_fetched(card: &Card, remote: &Remote, place: &Place) -> bool {
    let path = path_of(card, remote, place);
    path.is_file() && record(&path).is_some()
}

/// Why a mirror did not give the file, or why nothing more can be done here.
enum Failure {
    Mirror(String),
    Own(Error),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Own(e)
    }
}

fn client(patience: Patience) -> Result<Client> {
    // Only one can be installed in a process, and this is the only one there is.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder().user_agent(USER_AGENT).connect_timeout(patience.silence).timeout(patience.silence);
    client.build().map_err(|e| Error::failed(format!("starting HTTP: {}", causes(&e))))
}

/// An error with what caused it: the outermost message alone says little.
fn causes(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        text += &format!(": {e}");
        cause = e.source();
    }
    text
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn record(path: &Path) -> Option<Checked> {
    serde_json::from_slice(&std::fs::read(beside(path, ".sha256")).ok()?).ok()
}

/// Whether the file is there and is what it must be. One that is not is an error: it may be the user's only copy.
fn is_checked(path: &Path, remote: &Remote) -> Result<bool> {
    let data = match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        other => other.map_err(|e| Error::io("read", path, e))?,
    };
    let record = record(path);
    let changed = modified(&data);
    if record.as_ref().is_some_and(|r| (r.bytes, r.changed) == (data.len(), changed)) {
        return Ok(true);
    }
    let sha256 = atomic::sha256(path)?;
    let held_to = remote.sha256.as_ref().or(record.as_ref().map(|r| &r.sha256));
    if let Some(expected) = held_to.filter(|expected| !expected.eq_ignore_ascii_case(&sha256)) {
        return Err(Error::file(path, format!("sha256 {expected}"), sha256).with_hint("remove it; it is fetched again"));
    }
    keep(path, Checked { sha256, bytes: data.len(), changed })?;
    Ok(true)
}

fn modified(data: &std::fs::Metadata) -> u64 {
    let since = data.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_nanos() as u64)
}

fn keep(path: &Path, checked: Checked) -> Result<()> {
    atomic::write(&beside(path, ".sha256"), serde_json::to_vec(&checked).expect("plain values"))
}

struct Transfer<'a> {
    path: &'a Path,
    remote: &'a Remote,
    client: Client,
    patience: Patience,
}

impl Transfer<'_> {
    /// Fetches all of it from one mirror.
    fn from(&self, url: &str, progress: &mut dyn Progress) -> Result<(), Failure> {
        let mut last = String::new();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(self.patience.pause * 2u32.pow(attempt - 1));
                progress.at(0).map_err(Failure::Own)?;
            }
            match self.attempt(url, progress) {
                Ok(()) => return self.check(),
                Err(Attempt::Broken(what)) => last = what,
                Err(Attempt::Refused(what)) => return Err(Failure::Mirror(what)),
                Err(Attempt::Own(e)) => return Err(Failure::Own(e)),
            }
        }
        Err(Failure::Mirror(format!("{last} ({ATTEMPTS} attempts)")))
    }

    fn attempt(&self, url: &str, progress: &mut dyn Progress) -> Result<(), Attempt> {
        let part = beside(self.path, ".part");
        let begun: Option<Begun> =
            std::fs::read(beside(&part, ".json")).ok().and_then(|json| serde_json::from_slice(&json).ok());
        let have = std::fs::metadata(&part).map_or(0, |data| data.len());
        let version = begun.filter(|b| b.url == url && have > 0).and_then(|b| b.version);
        let mut request = self.client.get(url);
        if let Some(version) = &version {
            request = request.header(RANGE, format!("bytes={have}-")).header(IF_RANGE, version);
        }
        // A server that was never reached is not waited for: the next mirror may be.
        let hopeless = |e: &reqwest::Error| e.is_redirect() || e.is_connect() && have == 0;
        let response = request.send().map_err(|e| match hopeless(&e) {
            true => Attempt::Refused(causes(&e.without_url())),
            false => Attempt::Broken(causes(&e.without_url())),
        })?;
        let (start, total) = self.accept(&response, have)?;
        let version = strong(&response);
        let json = serde_json::to_vec(&Begun { url: url.to_owned(), version }).expect("plain texts");
        atomic::write(&beside(&part, ".json"), json)?;
        progress.begin(&format!("fetching {}", self.remote.name), total);
        let received = self.receive(response, &part, start, progress);
        progress.end();
        if matches!(received, Err(Attempt::Refused(_))) {
            // What came is of another file.
            self.forget()?;
        }
        let received = received?;
        match total {
            Some(total) if received < total => Err(Attempt::Broken(format!("ended after {received} of {total} bytes"))),
            Some(total) if received > total => Err(Attempt::Refused(format!("gave {received} bytes, not {total}"))),
            _ => Ok(()),
        }
    }

    /// Where in the file the answer begins, and how long the file is, if the answer is one to take.
    fn accept(&self, response: &Response, have: u64) -> Result<(u64, Option<u64>), Attempt> {
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let status = response.status();
        let (start, total) = match status {
            StatusCode::OK => (0, header(CONTENT_LENGTH).and_then(|n| n.parse().ok())),
            StatusCode::PARTIAL_CONTENT => {
                let range = header(CONTENT_RANGE).and_then(|text| text.strip_prefix("bytes "));
                let (range, total) = range.and_then(|r| r.split_once('/')).unwrap_or_default();
                if range.split('-').next().and_then(|n| n.parse().ok()) != Some(have) {
                    self.forget()?;
                    return Err(Attempt::Broken("another part of the file than was asked for".into()));
                }
                (have, total.parse().ok())
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                self.forget()?;
                return Err(Attempt::Broken("the file is shorter than what was fetched of it before".into()));
            }
            _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                return Err(Attempt::Broken(status.to_string()));
            }
            _ => return Err(Attempt::Refused(status.to_string())),
        };
        if header(CONTENT_TYPE).is_some_and(|kind| kind.starts_with("text/html")) && !self.is_page() {
            return Err(Attempt::Refused("a page of HTML instead of the file".into()));
        }
        match (self.remote.bytes, total) {
            (Some(expected), Some(total)) if expected != total => {
                Err(Attempt::Refused(format!("a file of {total} bytes, not {expected}")))
            }
            (expected, total) => Ok((start, total.or(expected))),
        }
    }

    fn is_page(&self) -> bool {
        let name = self.remote.name.to_lowercase();
        [".html", ".htm", ".xhtml"].iter().any(|ending| name.ends_with(ending))
    }

    /// Forgets what was fetched.
    fn forget(&self) -> Result<()> {
        let part = beside(self.path, ".part");
        atomic::remove(&beside(&part, ".json"))?;
        atomic::remove(&part)
    }

    /// Writes the answer from byte `start` of the file on; returns how long the file is now.
    fn receive(
        &self,
        mut response: Response,
        part: &Path,
        start: u64,
        progress: &mut dyn Progress,
    ) -> Result<u64, Attempt> {
        let unwritable = |e| Attempt::Own(Error::io("write", part, e));
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(part);
        let mut file = open.map_err(unwritable)?;
        file.set_len(start).and_then(|()| file.seek(SeekFrom::Start(start))).map_err(unwritable)?;
        let (mut at, mut block) = (start, vec![0; 1 << 16]);
        loop {
            let n = match response.read(&mut block) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Attempt::Broken(format!("broke off at byte {at}: {}", causes(&e)))),
            };
            if at == 0
                && let Some(what) = self.is_no_file(&block[..n])
            {
                return Err(Attempt::Refused(what.into()));
            }
            file.write_all(&block[..n]).map_err(unwritable)?;
            at += n as u64;
            if self.remote.bytes.is_some_and(|most| at > most) {
                return Err(Attempt::Refused(format!(
                    "more than the {} bytes of the file",
                    self.remote.bytes.unwrap_or(0)
                )));
            }
            progress.at(at)?;
        }
        file.sync_all().map_err(unwritable)?;
        Ok(at)
    }

    /// What the first bytes are, if that is not the beginning of a file but what servers send instead.
    fn is_no_file(&self, first: &[u8]) -> Option<&'static str> {
        let first = first.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(first).trim_ascii_start();
        let begins = |with: &[u8]| first.get(..with.len()).is_some_and(|part| part.eq_ignore_ascii_case(with));
        if !self.is_page() && (begins(b"<!doctype html") || begins(b"<html")) {
            return Some("a page of HTML instead of the file");
        }
        begins(b"version https://git-lfs").then_some("a pointer of git-lfs instead of the file")
    }

    /// Holds what was fetched against the card and the first download, and gives it its name.
    fn check(&self) -> Result<(), Failure> {
        let part = beside(self.path, ".part");
        let data = std::fs::metadata(&part).map_err(|e| Error::io("read", &part, e))?;
        if let Some(expected) = self.remote.bytes.filter(|expected| *expected != data.len()) {
            self.forget()?;
            return Err(Failure::Mirror(format!("a file of {} bytes, not {expected}", data.len())));
        }
        let sha256 = atomic::sha256(&part)?;
        let first = record(self.path).map(|r| r.sha256);
        if let Some(expected) = self.remote.sha256.as_ref().filter(|e| !e.eq_ignore_ascii_case(&sha256)) {
            self.forget()?;
            return Err(Failure::Mirror(format!("a file of sha256 {sha256}, not {expected}")));
        }
        if let Some(first) = first.filter(|first| self.remote.sha256.is_none() && *first != sha256) {
            self.forget()?;
            let record = beside(self.path, ".sha256");
            return Err(Failure::Mirror(format!(
                "another file than at the first download (sha256 {sha256}, not {first}); remove {} to take it",
                record.display()
            )));
        }
        keep(self.path, Checked { sha256, bytes: data.len(), changed: modified(&data) })?;
        std::fs::rename(&part, self.path).map_err(|e| Error::io("rename", &part, e))?;
        atomic::remove(&beside(&part, ".json"))?;
        atomic::sync_folder(self.path.parent().unwrap_or(Path::new(".")))?;
        Ok(())
    }
}

/// How an attempt failed: to be repeated, not to be repeated here, or not to be repeated at all.
enum Attempt {
    Broken(String),
    Refused(String),
    Own(Error),
}

impl From<Error> for Attempt {
    fn from(e: Error) -> Self {
        Self::Own(e)
    }
}

/// The name of this version of the file: a strong entity tag, or else when it was changed (RFC 9110, 13.1.5).
fn strong(response: &Response) -> Option<String> {
    let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    header(ETAG).filter(|tag| !tag.starts_with("W/")).or_else(|| header(LAST_MODIFIED)).map(str::to_owned)
}
