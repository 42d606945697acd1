//! The commit point of a run: `<run>/steps/NNNNNN/`, written whole under a temporary name, fsynced, and renamed.
//!
//! A step is complete if its manifest, which is written last, agrees with every file. Resume takes the newest complete one,
//! whatever was going on when the last run was killed. What must stay true: at every moment there is a complete step
//! once there was one. So a step that is written again waits as `NNNNNN.new` until the old one is out of the way, folders
//! are renamed before they are emptied, and only the one writer of the run (`lock`) writes or prunes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::foreign;
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::files::atomic::{self, Fill, TEMPORARY};

const MANIFEST: &str = "manifest.json";
/// A step that was written again and has not taken its name yet.
const AGAIN: &str = ".new";

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

/// Commits a step made of `files` (name, content). Steps after it are removed: whoever writes this one did not go on from
/// them, because they were damaged.
pub fn write<C: Fill>(run: &Path, step: u64, files: &[(&str, C)]) -> Result<PathBuf> {
    let steps = run.join("steps");
    let temporary = steps.join(format!("{TEMPORARY}{step:06}"));
    let written = atomic::create_folder(&steps)
        .and_then(|()| settle(&steps))
        .and_then(|()| fill(&temporary, files))
        .and_then(|()| commit(&steps, &temporary, step));
    if written.is_err() {
        // It may not exist; the first error is the one to tell.
        let _ = atomic::remove(&temporary);
    }
    let place = written?;
    let later = list(run)?.into_iter().filter(|found| found.step > step);
    later.into_iter().try_for_each(|found| discard(&found.path))?;
    Ok(place)
}

/// Writes all files of a step into a new folder, the manifest last.
fn fill<C: Fill>(folder: &Path, files: &[(&str, C)]) -> Result<()> {
    atomic::remove(folder)?;
    std::fs::create_dir(folder).map_err(|e| Error::io("create", folder, e))?;
    let mut manifest = Manifest { files: BTreeMap::new() };
    for (name, content) in files {
        let written = atomic::create(&folder.join(name), content)?;
        manifest.files.insert((*name).to_owned(), Sum { bytes: written.bytes, sha256: written.sha256 });
    }
    let text = serde_json::to_string_pretty(&manifest).expect("a map of plain values");
    atomic::create(&folder.join(MANIFEST), text.as_bytes())?;
    atomic::sync_folder(folder)
}

/// Gives a written step its name. The same step again (a run that was resumed from an older one, or that ends where
/// it was saved) replaces what is there.
fn commit(steps: &Path, temporary: &Path, step: u64) -> Result<PathBuf> {
    let place = steps.join(format!("{step:06}"));
    let name = if place.exists() { steps.join(format!("{step:06}{AGAIN}")) } else { place.clone() };
    std::fs::rename(temporary, &name).map_err(|e| Error::io("rename", &name, e))?;
    atomic::sync_folder(steps)?;
    settle(steps)?;
    Ok(place)
}

/// Lets steps that were written again take their names; also what a killed writer had still to do.
fn settle(steps: &Path) -> Result<()> {
    for found in list_folder(steps)?.into_iter().filter(|found| found.again) {
        let place = steps.join(format!("{:06}", found.step));
        discard(&place)?;
        std::fs::rename(&found.path, &place).map_err(|e| Error::io("rename", &place, e))?;
        atomic::sync_folder(steps)?;
    }
    Ok(())
}

/// Removes a step so that no half of it is ever taken for one.
fn discard(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let aside = folder.with_file_name(format!("{TEMPORARY}old-{name}"));
    atomic::remove(&aside)?;
    std::fs::rename(folder, &aside).map_err(|e| Error::io("rename", folder, e))?;
    atomic::remove(&aside)
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

/// The newest complete step of a run, and what was wrong with newer ones. Reads the steps whole, to check their sums.
pub fn newest(run: &Path) -> Result<(Option<StepFolder>, Vec<String>)> {
    let mut damaged = Vec::new();
    for Found { step, path, .. } in list(run)?.into_iter().rev() {
        match verify(&path, Depth::Sums) {
            Ok(()) => return Ok((Some(StepFolder { step, path }), damaged)),
            Err(e) => damaged.push(format!("{} is passed over: {e}", path.display())),
        }
    }
    Ok((None, damaged))
}

/// A folder that is named as a step; ordered by step, a rewritten one after the old.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    step: u64,
    again: bool,
    path: PathBuf,
}

/// All steps of a run in order, complete or not.
fn list(run: &Path) -> Result<Vec<Found>> {
    list_folder(&run.join("steps"))
}

fn list_folder(steps: &Path) -> Result<Vec<Found>> {
    let entries = match std::fs::read_dir(steps) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| Error::io("read", steps, e))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("read", steps, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let (number, again) = name.strip_suffix(AGAIN).map_or((&*name, false), |number| (number, true));
        // Only names that `write` gives: 000500, not +500 or 500.
        if let Some(step) = number.parse::<u64>().ok().filter(|step| format!("{step:06}") == number) {
            found.push(Found { step, again, path: path.clone() });
        }
    }
    found.sort();
    Ok(found)
}

/// How closely to look: sizes are enough to see a write that was cut short, sums see everything.
#[derive(Clone, Copy, PartialEq)]
enum Depth {
    Sizes,
    Sums,
}

fn verify(folder: &Path, depth: Depth) -> Result<()> {
    let path = folder.join(MANIFEST);
    let json = foreign::read_json(&path)?;
    let manifest: Manifest = serde_json::from_value(json.into())
        .map_err(|e| Error::file(&path, "the sizes and sums of a step's files", e.to_string()))?;
    if manifest.files.is_empty() {
        return Err(Error::file(&path, "the sizes and sums of a step's files", "none"));
    }
    for (name, sum) in &manifest.files {
        let path = folder.join(name);
        let bytes = path.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        if bytes != sum.bytes {
            return Err(Error::file(&path, format!("{} bytes", sum.bytes), format!("{bytes}")));
        }
        let sha256 = if depth == Depth::Sums { atomic::sha256(&path)? } else { sum.sha256.clone() };
        if sha256 != sum.sha256 {
            let told = |sum: &str| format!("sha256 {}...", sum.chars().take(12).collect::<String>());
            return Err(Error::file(&path, told(&sum.sha256), told(&sha256)));
        }
    }
    Ok(())
}

/// Removes all but the `keep` newest steps that are whole, and what interrupted writers left. The newest whole one always
/// stays; damaged ones do not count.
pub fn prune(run: &Path, keep: usize) -> Result<()> {
    let mut kept = 0;
    for found in list(run)?.into_iter().rev() {
        if kept >= keep.max(1) {
            discard(&found.path)?;
        } else if verify(&found.path, Depth::Sizes).is_ok() {
            kept += 1;
        }
    }
    atomic::sweep(&run.join("steps"))
}

#[cfg(test)]
mod tests;
