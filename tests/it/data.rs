//! Data from the command line: named sets from a server, every format and archive, what is no text, mixtures, packing.

use std::path::Path;

use serde_json::{Value, json};

use crate::command::{Done, Place, SMALL};
use crate::files;
use crate::server::{Answer, Server};

/// Trains one step.
fn step(place: &Place, data: &str, more: &[&str]) -> Done {
    let out = place.path("runs").join(data.replace(['/', ':', ',', '.'], "-"));
    let base = ["train", "--data", data, "--steps", "1", "--json", "--out", out.to_str().unwrap()];
    place.run(&[&base[..], SMALL, more].concat())
}

/// The documents of a source.
fn documents(place: &Place, source: &str, more: &[&str]) -> Vec<String> {
    let base = ["data", "show", source, "--json", "-n", "100", "--validation", "0"];
    let shown = place.run(&[&base[..], more].concat()).ok().json();
    serde_json::from_value(shown["documents"].clone()).unwrap()
}

/// What a file of a card holds in the tests, in the layout of the real one.
fn fixture(set: &str, name: &str) -> Vec<u8> {
    let prose = |what: &str| format!("{what} of {set}: once upon a time.\n").repeat(30);
    match (set, name) {
        ("wikitext-2" | "wikitext-103", _) => {
            let member = |split: &str| format!("{}-raw/wiki.{split}.raw", set);
            let [train, valid, test] = ["train", "valid", "test"].map(member);
            let texts = ["training", "held-out", "test"].map(prose);
            files::zip(&[
                (&train, texts[0].as_bytes()),
                (&valid, texts[1].as_bytes()),
                (&test, texts[2].as_bytes()),
            ])
        }
        ("enwik8", _) => files::zip(&[("enwik8", prose("<mediawiki>").as_bytes())]),
        ("tinystories", _) => "One day, Tim ran.\n<|endoftext|>\nA cat sat.\nIt was fat.\n<|endoftext|>\n".repeat(9).into(),
        ("gutenberg", _) => format!(
            "\u{FEFF}The Project Gutenberg eBook of X\r\n\r\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\r\n\r\n{}\r\n\
             *** END OF THE PROJECT GUTENBERG EBOOK X ***\r\n\r\nSTART: FULL LICENSE\r\n",
            prose(name)
        )
        .into(),
        _ => prose("text").into(),
    }
}

#[test]
fn every_named_set_ends_in_a_training_step() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets");
    let server = Server::start(|asked, _| {
        let (set, name) = asked.path[1..].split_once('/').unwrap();
        Answer::ok(&fixture(set, name))
    });
    let place = Place::new();
    let mut tried = 0;
    for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        let Some(name) = path.file_name().unwrap().to_str().unwrap().strip_suffix(".toml") else { continue };
        let data = match name {
            "stories" => name.to_owned(),
            _ => {
                // The card as it is, but for where its files are and what they are held to.
                let mut card: toml::Table = std::fs::read_to_string(&path).unwrap().parse().unwrap();
                for file in card["file"].as_array_mut().unwrap() {
                    let file = file.as_table_mut().unwrap();
                    let at = format!("{}/{name}/{}", server.address, file["name"].as_str().unwrap());
                    file.insert("mirrors".into(), vec![at].into());
                    file.retain(|key, _| key != "bytes" && key != "sha256");
                }
                let card_name = format!("{name}.toml");
                place.file(&card_name, toml::to_string(&card).unwrap());
                card_name
            }
        };
        let trained = step(&place, &data, &[]).ok().json();
        assert!(trained["val_loss"].as_f64().is_some_and(f64::is_finite), "{name}: {trained}");
        // The second time nothing is fetched.
        let (before, info) = (server.asked().len(), place.run(&["data", "info", &data, "--json", "--offline"]).ok());
        assert_eq!(server.asked().len(), before);
        assert_eq!(info.json()["splits"][1]["name"], "validation");
        tried += 1;
    }
    assert_eq!(tried, 7);
    let held_out = |set: &str| -> String {
        let shown = place.run(&["data", "show", &format!("{set}.toml"), "--held-out", "--json"]).ok().json();
        shown["documents"][0].as_str().unwrap().to_owned()
    };
    assert!(held_out("wikitext-2").starts_with("held-out of wikitext-2"));
    let eval = |data: &str, more: &[&str]| {
        let run = place.path("runs/wikitext-2-toml");
        place.run(&[&["eval", run.to_str().unwrap(), "--data", data, "--json"], more].concat())
    };
    let bytes = |more: &[&str]| eval("wikitext-2.toml", more).ok().json()["bytes"].as_u64().unwrap();
    // "held-out" has four letters more than "test", thirty times; the first byte of a text is not predicted.
    assert_eq!(bytes(&[]) - bytes(&["--test"]), 4 * 30);
    eval("shakespeare.toml", &["--test"]).fails(2, &["shakespeare has no test split"]);
    assert_eq!(held_out("tinystories"), "One day, Tim ran.");
    let book = &documents(&place, "gutenberg.toml", &[])[0];
    assert!(book.starts_with("pg100.txt of gutenberg") && !book.contains("LICENSE") && !book.contains("***"), "{book}");
}

#[test]
fn named_sets_are_listed_and_unknown_ones_and_those_that_were_not_fetched_are_told() {
    let place = Place::new();
    let list = place.run(&["data", "list", "--json"]).ok().json();
    let names: Vec<&str> = list["sets"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["stories", "shakespeare", "tinystories", "wikitext-2", "wikitext-103", "gutenberg", "enwik8"]);
    assert_eq!(list["sets"][0]["fetched"], true);
    let info = place.run(&["data", "info", "wikitext-2", "--json"]).ok().json();
    assert_eq!((&info["card"]["fetched"], &info["tokens"]), (&json!(false), &Value::Null));
    step(&place, "wikitext-2", &["--offline"]).fails(1, &["wikitext-2-raw-v1.zip", "gpt data fetch wikitext-2"]);
    place.run(&["data", "fetch", "wikitxt-2"]).fails(2, &["did you mean", "wikitext-2"]);
}

const DOCUMENTS: [&str; 4] = ["the first, \"quoted\"", "second\nof two lines", "drittes: äöü 漢字 😀", "the last"];

#[test]
fn the_same_documents_come_out_of_every_format_and_archive() {
    let place = Place::new();
    let lines: String = DOCUMENTS.iter().map(|d| json!({"id": 1, "text": d}).to_string() + "\n").collect();
    let table = |delimiter: &str| {
        let quoted = |d: &&str| format!("1{delimiter}\"{}\"\n", d.replace('"', "\"\""));
        format!("id{delimiter}text\n{}", DOCUMENTS.iter().map(quoted).collect::<String>())
    };
    let (csv, tsv) = (table(","), table("\t"));
    let names = ["a.txt", "b/c.md", "b/d", "e.txt"];
    let members: Vec<(&str, &[u8])> = names.into_iter().zip(DOCUMENTS.map(str::as_bytes)).collect();
    let tar = files::tar(&members);
    let all: [(&str, Vec<u8>); 14] = [
        ("x.jsonl", lines.clone().into()),
        ("x.ndjson", DOCUMENTS.map(|d| json!(d).to_string()).join("\n\n").into()),
        ("x.csv", csv.clone().into()),
        ("x.tsv", tsv.into()),
        ("x.parquet", files::parquet("text", &DOCUMENTS)),
        ("x.txt.zip", files::zip(&members)),
        ("y.tar", tar.clone()),
        ("y.tar.gz", files::gzip(&tar)),
        ("y.tgz", files::gzip(&tar)),
        ("y.tar.zst", files::zstd(&tar)),
        ("z.jsonl.gz", [files::gzip(&lines.as_bytes()[..20]), files::gzip(&lines.as_bytes()[20..])].concat()),
        ("z.CSV.zst", files::zstd(csv.as_bytes())),
        (
            "w.jsonl",
            lines.encode_utf16().fold(vec![0xFF, 0xFE], |mut v, u| {
                v.extend(u.to_le_bytes());
                v
            }),
        ),
        ("v.jsonl.zip", files::zip(&[("deep/er.jsonl", lines.as_bytes())])),
    ];
    for (name, content) in &all {
        place.file(name, content);
        assert_eq!(documents(&place, name, &[]), DOCUMENTS, "{name}");
    }
    // In one folder all of them are one source.
    for (name, content) in &all {
        place.file(&format!("folder/{name}"), content);
    }
    let info = place.run(&["data", "info", "folder", "--json"]).ok().json();
    let count: u64 = info["splits"].as_array().unwrap().iter().map(|s| s["documents"].as_u64().unwrap()).sum();
    assert_eq!(count as usize, all.len() * DOCUMENTS.len());
    assert_eq!(documents(&place, "folder", &["--deduplicate"]).len(), DOCUMENTS.len());
    step(&place, "folder", &[]).ok();
}

#[test]
fn other_fields_are_named_and_missing_ones_are_said() {
    let place = Place::new();
    place.file(
        "a.jsonl",
        "{\"body\": {\"en\": \"one\"}, \"a.b\": \"x\"}\n{\"body\": 3}\n{\"body\": {\"en\": \"two\"}}\n",
    );
    place.file("a.csv", "n,body\n1,one\n2\n3,two\n");
    place.file("a.parquet", files::parquet("body", &["one", "", "two"]));
    for (file, field) in [("a.jsonl", "body.en"), ("a.csv", "body"), ("a.parquet", "body")] {
        let shown = place.run(&["data", "show", file, "--json", "--validation", "0", "--field", field]).ok();
        assert_eq!(shown.json()["documents"], json!(["one", "two"]), "{file}");
        assert!(shown.stderr.contains("1 records without the field"), "{}", shown.stderr);
        step(&place, file, &[]).fails(1, &["`text`", "`body", "--field"]);
    }
    assert_eq!(documents(&place, "a.jsonl", &["--field", "a.b"]), ["x"]);
    // In a folder, tables of something else are passed over.
    place.file("folder/a.csv", "n,body\n1,one\n");
    place.file("folder/b.md", "notes");
    let shown = place.run(&["data", "show", "folder", "--json", "--validation", "0"]).ok();
    assert_eq!(shown.json()["documents"], json!(["notes"]));
    assert!(shown.stderr.contains("1 files"), "{}", shown.stderr);
    place.file("n.parquet", files::parquet("text", &["x"]));
    step(&place, "n.parquet", &["--field", "id"]).fails(1, &["texts in the column `id`", "numbers"]);
    place.file("b.jsonl", "{\"text\": \"fine\"}\n{\"text\": broken}\n");
    step(&place, "b.jsonl", &[]).fails(1, &["b.jsonl", "line 2"]);
}

#[test]
fn pages_and_books_become_text() {
    let place = Place::new();
    let page = "<!DOCTYPE html><html><head><title>T</title><style>p {}</style><script>var x = 1;</script></head>\
                <body><h1>Head &amp; line</h1><p>One <b>bold</b> word.</p><ul><li>item</li></ul><p>Zwei&nbsp;Wörter</p></body>";
    place.file("a.html", page);
    let [text] = &documents(&place, "a.html", &[])[..] else { panic!("one document") };
    for part in ["Head & line", "One bold word.", "item", "Wörter"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("var x") && !text.contains('<') && !text.contains("p {}"), "{text}");
    let chapter =
        |text: &str| format!("<html xmlns=\"http://www.w3.org/1999/xhtml\"><body><p>{text}</p></body></html>");
    place.file("a.epub", files::epub(&[&chapter("the end"), &chapter("in the beginning")]));
    assert_eq!(documents(&place, "a.epub", &[]), ["in the beginning\n\nthe end"]);
    place.file("b.epub", files::zip(&[("x", b"y")]));
    step(&place, "b.epub", &[]).fails(1, &["an epub", "META-INF/container.xml"]);
}

#[test]
fn what_is_no_text_is_replaced_refused_or_left_out_and_said() {
    let place = Place::new();
    place.file(
        "latin.txt",
        [&b"caf\xE9 "[..]; 3]
            .concat()
            .repeat(9)
            .as_slice()
            .iter()
            .chain(b"and much more plain text".repeat(9).iter())
            .copied()
            .collect::<Vec<u8>>(),
    );
    let shown = place.run(&["data", "show", "latin.txt", "--validation", "0"]).ok();
    assert!(shown.stdout.contains("caf\u{FFFD}") && shown.stderr.contains("27 bytes that are not UTF-8 were replaced"));
    step(&place, "latin.txt", &["--invalid-utf8", "refuse"])
        .fails(1, &["latin.txt", "offset 3", "--invalid-utf8 replace"]);
    step(&place, "latin.txt", &["--invalid-utf8", "maybe"]).fails(2, &["maybe", "replace or refuse"]);
    step(&place, "latin.txt", &["--allow-binary"]).ok();
    place.file("pair.zip", files::zip(&[("a.txt", b"fine text"), ("b.png", &[0; 50]), ("c.txt", b"more of it")]));
    let shown = place.run(&["data", "show", "pair.zip", "--json", "--validation", "0"]).ok();
    assert_eq!(shown.json()["documents"], json!(["fine text", "more of it"]));
    assert!(shown.stderr.contains("1 files that are not text, or lack the field, were left out"), "{}", shown.stderr);
    for (name, content) in [
        ("a.zip", &b"<html>"[..]),
        ("a.gz", b"not gzip"),
        ("a.zst", b"not zstd at all"),
        ("a.tar", b"no tar, but some bytes that are no header of one"),
        ("a.parquet", b"PAR1 no"),
        ("e.jsonl", b""),
    ] {
        place.file(name, content);
        step(&place, name, &[]).fails(1, &[name]);
    }
    let whole = files::gzip(&b"a text that is long enough".repeat(100));
    place.file("cut.txt.gz", &whole[..whole.len() - 10]);
    step(&place, "cut.txt.gz", &[]).fails(1, &["cut.txt.gz", "fetch it again"]);
}

#[test]
fn line_ends_and_separators_are_as_asked_for() {
    let place = Place::new();
    place.file("a.txt", "one\r\ntwo\r\n<end>\r\nthree\r\n  <end> <end>\r\n");
    assert_eq!(documents(&place, "a.txt", &[])[0], "one\r\ntwo\r\n<end>\r\nthree\r\n  <end> <end>\r\n");
    let apart = documents(&place, "a.txt", &["--line-endings", "lf", "--separator", "<end>"]);
    assert_eq!(apart, ["one\ntwo", "three"]);
    step(&place, "a.txt", &["--line-endings", "cr"]).fails(2, &["keep or lf"]);
}

#[test]
fn no_name_in_an_archive_leads_anywhere() {
    let place = Place::new();
    let members: [(&str, &[u8]); 3] = [("../evil.txt", b"up"), ("/tmp/gpt-evil.txt", b"root"), ("ok.txt", b"fine")];
    place.file("in/a.zip", files::zip(&members));
    place.file("in/a.tar", files::tar(&members));
    for name in ["in/a.zip", "in/a.tar"] {
        assert_eq!(documents(&place, name, &[]), ["up", "root", "fine"]);
    }
    assert!(!place.path("evil.txt").exists() && !place.path("in/../evil.txt").exists());
    assert!(!Path::new("/tmp/gpt-evil.txt").exists());
}

#[test]
fn mixtures_take_their_shares_and_resume_where_they_were() {
    let place = Place::new();
    place.text();
    place.file("b.jsonl", "{\"text\": \"another kind of text\"}\n".repeat(40));
    let mixed = "text.txt:0.75,b.jsonl:0.25";
    let info = place.run(&["data", "info", mixed, "--json"]).ok().json();
    assert_eq!(info["name"], "text+b");
    assert_eq!(info["splits"].as_array().unwrap().len(), 4);
    let run = |out: &str, steps: &str, more: &[&str]| {
        let base = ["train", "--data", mixed, "--out", out, "--steps", steps, "--schedule", "constant", "--json"];
        place.run(&[&base[..], SMALL, more].concat()).ok().json()
    };
    run("whole", "6", &[]);
    run("parts", "3", &[]);
    run("parts", "6", &["--resume"]);
    let bytes = |out: &str| std::fs::read(place.path(out).join("model.safetensors")).unwrap();
    assert_eq!(bytes("whole"), bytes("parts"));
    step(&place, "text.txt:0.5,b.jsonl", &[]).fails(2, &["some sources have a weight"]);
}

#[test]
fn documents_share_windows_as_asked() {
    let place = Place::new();
    let line = |i: usize| format!("{}\n", json!({"text": format!("document {i} has {} words", i % 7)}));
    place.file("a.jsonl", (0..60).map(line).collect::<String>());
    let mut losses = Vec::new();
    for pack in ["across", "within", "off"] {
        let base = ["train", "--data", "a.jsonl", "--steps", "1", "--json", "--out", pack, "--pack", pack];
        let small: Vec<&str> = SMALL.iter().map(|flag| if *flag == "16" { "64" } else { *flag }).collect();
        let out = place.run(&[&base[..], &small].concat()).ok().json();
        losses.push(out["train_loss"].as_f64().unwrap());
    }
    assert!(losses.iter().all(|l| l.is_finite()) && losses[0] != losses[1], "{losses:?}");
    step(&place, "a.jsonl", &["--pack", "tight"]).fails(2, &["across, within or off"]);
}

#[test]
fn a_text_is_tokenized_once_for_all_runs() {
    let place = Place::new();
    let text: String = (0..60_000).map(|i| format!("line {i} of the text\n")).collect();
    place.file("a.txt", &text);
    let made = ["tokenizer", "train", "--data", "a.txt", "--vocab", "400", "--out", "tok", "--json"];
    let made = place.run(&made).ok().json();
    assert_eq!(made["vocab_size"], 400);
    let info =
        |more: &[&str]| place.run(&[&["data", "info", "a.txt", "--tokenizer", "tok", "--json"], more].concat()).ok();
    let first = info(&[]).json();
    let files = || {
        let all = std::fs::read_dir(place.path(".cache/tokens")).unwrap().flatten();
        let mut all: Vec<_> = all.filter(|f| f.path().extension().is_some_and(|e| e == "tok")).collect();
        all.sort_by_key(|f| f.file_name());
        all.iter().map(|f| (f.file_name(), f.metadata().unwrap().modified().unwrap())).collect::<Vec<_>>()
    };
    let before = files();
    assert!(!before.is_empty());
    assert_eq!(info(&[]).json(), first);
    // A copy is the same text.
    place.file("copy.txt", &text);
    place.run(&["data", "prepare", "copy.txt", "--tokenizer", "tok"]).ok();
    assert_eq!(files(), before);
    // Damage in the cache is made anew.
    let path = place.path(".cache/tokens").join(&before[0].0);
    std::fs::write(&path, "<html>").unwrap();
    assert_eq!(info(&[]).json(), first);
    assert_eq!(std::fs::read(&path).unwrap()[..7], *b"gpt-ids");
    step(&place, "a.txt", &["--tokenizer", "tok"]).ok();
}
