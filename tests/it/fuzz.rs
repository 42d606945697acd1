//! Damaged files of every kind: an error or some text, never a panic, and never more memory than the file explains.

use std::path::Path;

use gpt::data::place::Place;
use gpt::data::progress::Told;
use gpt::data::{Reading, text};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::files;

/// A change of a file: at a place (in thousandths), so many bytes give way to others.
#[derive(Clone, Debug)]
struct Change {
    at: usize,
    gone: usize,
    new: Vec<u8>,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let bytes = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..6),
        Just(vec![0xFF; 8]),
        Just(vec![0; 8]),
        Just(b"\"{[<\n,".to_vec()),
    ];
    let change = (0usize..=1000, prop_oneof![Just(0), 0usize..10, Just(100_000)], bytes)
        .prop_map(|(at, gone, new)| Change { at, gone, new });
    prop::collection::vec(change, 1..4)
}

fn changed(whole: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for Change { at, gone, new } in changes {
        let at = bytes.len() * at / 1000;
        let end = (at + gone).min(bytes.len());
        bytes.splice(at..end, new.iter().copied());
    }
    bytes
}

fn whole() -> Vec<(&'static str, Vec<u8>)> {
    let lines = "{\"text\": \"one\", \"n\": [1, {\"a\": null}]}\n{\"text\": \"two\\u00e9\"}\n".repeat(5);
    let page = "<html><body><table><tr><td>a<td>b</table><p>text <b>bold</b> &amp; <ul><li>x</ul></body></html>";
    let members: [(&str, &[u8]); 3] =
        [("a.txt", b"plain text"), ("b.jsonl", lines.as_bytes()), ("c.html", page.as_bytes())];
    vec![
        ("x.txt", "text of some length, é漢😀\r\n".repeat(9).into()),
        ("x.jsonl", lines.clone().into()),
        ("x.csv", "n,text\n1,\"one, \"\"two\"\"\"\n2,three\n".repeat(3).into()),
        ("x.parquet", files::parquet("text", &["one", "", "three", "four"])),
        ("x.html", page.into()),
        ("x.epub", files::epub(&[page, "<p>second</p>"])),
        ("x.zip", files::zip(&members)),
        ("x.tar", files::tar(&members)),
        ("x.txt.gz", files::gzip(&b"text of some length".repeat(20))),
        ("x.txt.zst", files::zstd(&b"text of some length".repeat(20))),
        ("x.tar.gz", files::gzip(&files::tar(&members))),
    ]
}

/// Reads a file of that name and content in both ways.
fn read(folder: &Path, name: &str, content: &[u8]) {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    for separator in ["", "text"] {
        let reading =
            Reading { field: "text".into(), separator: separator.into(), validation: 0.1, ..Reading::default() };
        let source = text::source(&path).unwrap();
        if let Ok(splits) = text::read(&source, &reading, &Place::new(folder.join("cache")), &mut Told::default()) {
            let text = splits.train.bytes.len() + splits.validation.bytes.len();
            // A block of zstd may repeat a byte 2^17 times, and takes four bytes (RFC 8878, 3.1.1.2): the format's own bound.
            let most = if name.ends_with(".zst") { content.len() << 15 } else { 64 * content.len() + 4096 };
            assert!(text <= most, "{name}: {text} bytes of {}", content.len());
            assert!(std::str::from_utf8(&splits.train.bytes).is_ok(), "{name}: what is read is UTF-8");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, rng_seed: RngSeed::Fixed(5), ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(changes in changes()) {
        let dir = tempfile::tempdir().unwrap();
        for (name, whole) in whole() {
            read(dir.path(), name, &changed(&whole, &changes));
        }
    }

    #[test]
    fn random_bytes_under_any_name_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let dir = tempfile::tempdir().unwrap();
        for (name, whole) in whole() {
            read(dir.path(), name, &bytes);
            // With the beginning that says what it is.
            read(dir.path(), name, &[&whole[..whole.len().min(8)], &bytes].concat());
        }
    }
}

#[test]
fn whole_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in whole() {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let reading = Reading { field: "text".into(), ..Reading::default() };
        let place = Place::new(dir.path().join("cache"));
        let splits = text::read(&text::source(&path).unwrap(), &reading, &place, &mut Told::default()).unwrap();
        assert!(!splits.train.bytes.is_empty(), "{name}");
    }
}

#[test]
fn a_bomb_is_refused_before_it_fills_anything() {
    // More than a gigabyte out of a megabyte: what comes out is read, and let go.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb.txt.gz");
    let once = files::gzip(&vec![b'a'; 1 << 24]);
    // Streams of gzip may follow each other.
    std::fs::write(&path, once.repeat(70)).unwrap();
    let mut out = 0u64;
    let result = gpt::data::archive::visit(&path, &Default::default(), &mut |member| {
        out = std::io::copy(member.reader, &mut std::io::sink()).map_err(|e| gpt::data::archive::damaged(&path, e))?;
        Ok(())
    });
    let said = result.unwrap_err().to_string();
    assert!(said.contains("grows more than 250 times"), "{said}");
}
