//! The computed prompt in a file: keys and values that another run takes up instead of computing them again.
//!
//! Used by `sample`. The file names what it was computed with, the weights by their hash, and is refused by anything else.
//! Layout: a magic line, a line of JSON, the pages, and the SHA-256 of all before it.

use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::engine::{Engine, Row, RowSettings};
use crate::error::{Error, Result};
use crate::files::atomic;

const MAGIC: &[u8] = b"gpt-cache-1\n";

/// What keys and values depend on beside the ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// SHA-256 of the model's config and weights.
    pub model: String,
    /// The type that weights are kept in.
    pub weights: String,
    pub kernels: String,
    /// Window, sinks and type of the cache.
    pub cache: String,
}

#[derive(Serialize, Deserialize)]
struct Header {
    origin: Origin,
    ids: Vec<u32>,
}

/// Writes what is computed of a row.
pub fn save(path: &Path, origin: &Origin, row: &Row) -> Result<()> {
    let mut bytes = MAGIC.to_vec();
    let header = Header { origin: origin.clone(), ids: row.ids().to_vec() };
    bytes.extend(serde_json::to_vec(&header).expect("plain values"));
    bytes.push(b'\n');
    row.write_cache(&mut bytes)?;
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest);
    atomic::write(path, &bytes[..])
}

/// Reads a row back, for the engine that `origin` describes.
pub fn load(path: &Path, origin: &Origin, engine: &Engine, settings: RowSettings) -> Result<Row> {
    let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let damaged = |found: &str| Error::file(path, "a cache written by --save-cache", found);
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| damaged("something else"))?;
    let digest = rest.len().checked_sub(32).ok_or_else(|| damaged("a cut file"))?;
    let (content, sum) = (&bytes[..MAGIC.len() + digest], &rest[digest..]);
    if Sha256::digest(content)[..] != *sum {
        return Err(damaged("a damaged or cut file"));
    }
    let end = rest[..digest].iter().position(|b| *b == b'\n').ok_or_else(|| damaged("no header"))?;
    let header: Header = serde_json::from_slice(&rest[..end]).map_err(|e| damaged(&e.to_string()))?;
    let parts = [
        ("another model", &header.origin.model, &origin.model),
        ("weights of another type", &header.origin.weights, &origin.weights),
        ("other CPU kernels", &header.origin.kernels, &origin.kernels),
        ("other settings of the cache", &header.origin.cache, &origin.cache),
    ];
    if let Some((what, found, wanted)) = parts.into_iter().find(|(_, found, wanted)| found != wanted) {
        let short = |text: &str| text.chars().take(60).collect::<String>();
        return Err(Error::file(
            path,
            format!("a cache of this run ({})", short(wanted)),
            format!("one of {what} ({})", short(found)),
        )
        .with_hint("write it again with --save-cache"));
    }
    let mut row = engine.row(&header.ids, settings)?;
    row.read_cache(&rest[end + 1..digest]).ok_or_else(|| damaged("pages that do not fit the model"))?;
    Ok(row)
}
