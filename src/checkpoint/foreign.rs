//! Names what a file really is when it is not what its name says: a web page, a git-lfs pointer, nothing at all.
//!
//! Called by every reader of this folder on the first bytes of a file. Downloads that went wrong are by far the most usual
//! broken checkpoints, and "invalid header" helps nobody.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// How many leading bytes are enough to tell.
pub const START: usize = 512;

/// What the first bytes of a file show it to be, and what to do about it; `None` if nothing known.
pub fn recognise(start: &[u8]) -> Option<(&'static str, &'static str)> {
    const AGAIN: &str = "the download failed; get the file again";
    if start.is_empty() {
        return Some(("an empty file", AGAIN));
    }
    let text = start.trim_ascii_start();
    let begins = |prefix: &str| text.get(..prefix.len()).is_some_and(|b| b.eq_ignore_ascii_case(prefix.as_bytes()));
    if ["<!doctype", "<html", "<head", "<?xml", "<body"].iter().any(|p| begins(p)) {
        return Some(("a web page (HTML)", "the address gave a page instead of the file; get the file itself"));
    }
    if begins("version https://git-lfs") {
        return Some(("a git-lfs pointer", "the contents were never fetched: run `git lfs pull` in that folder"));
    }
    if start.starts_with(b"GGUF") {
        return Some(("a GGUF file", "name the .gguf file itself as the checkpoint"));
    }
    if start.starts_with(b"PK\x03\x04") {
        return Some(("a zip archive (PyTorch saves .bin and .pt so)", "convert it to safetensors first"));
    }
    if start.len() >= 8 && start.iter().all(|&b| b == 0) {
        return Some(("nothing but zero bytes", "the disk or the download lost the contents; get the file again"));
    }
    None
}

/// The error for `path` if its first bytes show it to be something known that is not `expected`.
pub fn refuse(path: &Path, start: &[u8], expected: &str) -> Result<()> {
    match recognise(&start[..start.len().min(START)]) {
        Some((found, hint)) => Err(Error::file(path, expected, found).with_hint(hint)),
        None => Ok(()),
    }
}

/// A file that must be a JSON object, read whole.
pub fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    parse_json(path, &bytes)
}

/// The JSON object in `bytes`, which were read from `path`.
pub fn parse_json(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>> {
    refuse(path, bytes, "a JSON object")?;
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(Error::file(path, "a JSON object", kind(&other))),
        Err(e) => {
            let size = bytes.len();
            Err(Error::file(path, "a JSON object", format!("{size} bytes that are not valid JSON ({e})")))
        }
    }
}

/// A JSON value in a few words, for errors.
pub fn kind(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(list) => format!("a list of {}", list.len()),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_accidents_are_named() {
        let named = |bytes: &[u8]| recognise(bytes).map(|(what, _)| what);
        assert_eq!(named(b""), Some("an empty file"));
        assert_eq!(named(b"\n  <!DOCTYPE html><html>"), Some("a web page (HTML)"));
        assert_eq!(named(b"version https://git-lfs.github.com/spec/v1\noid"), Some("a git-lfs pointer"));
        assert_eq!(named(b"GGUF\x03\0\0\0"), Some("a GGUF file"));
        assert_eq!(named(&[0; 20]), Some("nothing but zero bytes"));
        // A safetensors header of 60 bytes begins with `<`.
        assert_eq!(named(b"<\0\0\0\0\0\0\0{\"a\":"), None);
        assert_eq!(named(b"{}"), None);
    }
}
