//! The commit point of a run: `<run>/steps/NNNNNN/`, written whole under a temporary name, fsynced, and renamed.
//!
//! A step is complete if its manifest, which is written last, agrees with every file. Resume takes the newest complete one,
//! whatever was going on when the last run was killed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::atomic;
use super::weights::Weights;
use crate::error::{Error, Result};

const MANIFEST: &str = "manifest.json";
const TEMPORARY: &str = ".tmp-";

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    /// File name -> what it must be.
    files: BTreeMap<String, Sum>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    sha256: String,
}

impl Sum {
    fn of(bytes: &[u8]) -> Self {
        let sha256 = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        Self { bytes: bytes.len() as u64, sha256 }
    }
}

/// Commits a step made of `files` (name, content).
pub fn write(run: &Path, step: u64, files: &[(&str, Vec<u8>)]) -> Result<PathBuf> {
    let steps = run.join("steps");
    let temporary = steps.join(format!("{TEMPORARY}{step:06}"));
    let place = steps.join(format!("{step:06}"));
    let written = (|| {
        remove(&temporary)?;
        std::fs::create_dir_all(&temporary).map_err(|e| Error::io("create", &temporary, e))?;
        let mut manifest = Manifest { files: BTreeMap::new() };
        for (name, bytes) in files {
            atomic::create(&temporary.join(name), bytes)?;
            manifest.files.insert((*name).to_owned(), Sum::of(bytes));
        }
        let text = serde_json::to_string_pretty(&manifest).expect("a map of plain values");
        atomic::create(&temporary.join(MANIFEST), text.as_bytes())?;
        atomic::sync_folder(&temporary)?;
        // The same step again (a run that was resumed from an older one) replaces what is there.
        remove(&place)?;
        std::fs::rename(&temporary, &place).map_err(|e| Error::io("rename", &place, e))?;
        atomic::sync_folder(&steps)
    })();
    if written.is_err() {
        let _ = std::fs::remove_dir_all(&temporary);
    }
    written.map(|()| place)
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", folder, e)),
        _ => Ok(()),
    }
}

/// A complete step.
#[derive(Debug)]
pub struct StepFolder {
    pub step: u64,
    pub path: PathBuf,
}

impl StepFolder {
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.path.join(name);
        std::fs::read(&path).map_err(|e| Error::io("read", &path, e))
    }

    pub fn tensors(&self, name: &str) -> Result<Weights> {
        Weights::open(&self.path.join(name))
    }
}

/// The newest complete step of a run, and what was wrong with newer ones.
pub fn newest(run: &Path) -> Result<(Option<StepFolder>, Vec<String>)> {
    let mut damaged = Vec::new();
    for (step, path) in list(run)?.into_iter().rev() {
        match verify(&path) {
            Ok(()) => return Ok((Some(StepFolder { step, path }), damaged)),
            Err(e) => damaged.push(format!("{} is passed over: {e}", path.display())),
        }
    }
    Ok((None, damaged))
}

/// All steps of a run by number, complete or not.
fn list(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let steps = run.join("steps");
    let entries = match std::fs::read_dir(&steps) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| Error::io("read", &steps, e))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("read", &steps, e))?.path();
        if let Some(step) = path.file_name().and_then(|n| n.to_str()?.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

fn verify(folder: &Path) -> Result<()> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
    let manifest: Manifest =
        serde_json::from_str(&text).map_err(|e| Error::file(&path, "a manifest", e.to_string()))?;
    for (name, sum) in &manifest.files {
        let path = folder.join(name);
        let found = Sum::of(&std::fs::read(&path).map_err(|e| Error::io("read", &path, e))?);
        if found != *sum {
            let told = |s: &Sum| format!("{} bytes of sha256 {}", s.bytes, &s.sha256[..12.min(s.sha256.len())]);
            return Err(Error::file(&path, told(sum), told(&found)));
        }
    }
    Ok(())
}

/// Removes all but the `keep` newest steps, and what an interrupted writer left.
pub fn prune(run: &Path, keep: usize) -> Result<()> {
    let steps = list(run)?;
    let surplus = steps.len().saturating_sub(keep.max(1));
    steps[..surplus].iter().try_for_each(|(_, path)| remove(path))?;
    let folder = run.join("steps");
    for entry in std::fs::read_dir(&folder).map_err(|e| Error::io("read", &folder, e))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(salt: u8) -> Vec<(&'static str, Vec<u8>)> {
        vec![("a", vec![salt; 100]), ("b.json", vec![salt, 1, 2])]
    }

    #[test]
    fn the_newest_complete_step_is_found_past_every_kind_of_damage() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        assert!(newest(run).unwrap().0.is_none());
        for step in [1, 2, 3, 4, 5, 6] {
            write(run, step, &files(step as u8)).unwrap();
        }
        let at = |step: u64, name: &str| run.join(format!("steps/{step:06}/{name}"));
        std::fs::remove_file(at(6, MANIFEST)).unwrap();
        std::fs::write(at(5, "a"), [5u8; 99]).unwrap();
        std::fs::write(at(4, "a"), [0u8; 100]).unwrap();
        std::fs::remove_file(at(3, "b.json")).unwrap();
        std::fs::create_dir_all(run.join("steps/.tmp-000007")).unwrap();
        let (found, damaged) = newest(run).unwrap();
        let found = found.unwrap();
        assert_eq!((found.step, damaged.len()), (2, 4));
        assert_eq!(found.read("a").unwrap(), [2u8; 100]);
    }

    #[test]
    fn pruning_keeps_the_newest_and_clears_what_was_left_over() {
        let dir = tempfile::tempdir().unwrap();
        for step in [10, 20, 30] {
            write(dir.path(), step, &files(0)).unwrap();
        }
        std::fs::create_dir_all(dir.path().join("steps/.tmp-000040")).unwrap();
        prune(dir.path(), 2).unwrap();
        let left: Vec<u64> = list(dir.path()).unwrap().into_iter().map(|(step, _)| step).collect();
        assert_eq!(left, [20, 30]);
        assert!(!dir.path().join("steps/.tmp-000040").exists());
        prune(dir.path(), 0).unwrap();
        assert_eq!(list(dir.path()).unwrap().len(), 1, "one is always kept");
    }

    #[test]
    fn a_failing_write_leaves_older_steps_and_no_rest() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 1, &files(1)).unwrap();
        // A file name with a folder that does not exist cannot be created.
        let error = write(dir.path(), 2, &[("a", vec![1]), ("none/b", vec![2])]).unwrap_err();
        assert!(error.to_string().contains("none/b"));
        assert_eq!(newest(dir.path()).unwrap().0.unwrap().step, 1);
        assert_eq!(std::fs::read_dir(dir.path().join("steps")).unwrap().count(), 1);
    }
}
