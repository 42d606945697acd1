//! One writer a run: an advisory lock that the system releases with the process, however it ends.
//!
//! `recipes` takes it before anything is written and holds it to the end. Readers of a model need none, so that one can
//! sample from a run in training: files are replaced by rename, and `weights` keeps those open that it began with.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::{Error, Result};

/// Held for as long as this lives.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Takes `<run>/.lock`; refused, naming the process, while another holds it.
    pub fn take(run: &Path) -> Result<Self> {
        let path = run.join(".lock");
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = open.map_err(|e| Error::io("open", &path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            // Some network disks have no locks; to work without one there is better than not to work.
            Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "another process".to_owned(),
                    id => format!("process {id}"),
                };
                let what = format!("{} is in use by {holder}", run.display());
                return Err(Error::failed(what).with_hint("wait for it, stop it, or choose another --out"));
            }
        }
        let id = std::process::id().to_string();
        file.set_len(0).and_then(|()| file.write_all(id.as_bytes())).map_err(|e| Error::io("write", &path, e))?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_writer_is_refused_until_the_first_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunLock::take(dir.path()).unwrap();
        let error = RunLock::take(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
        drop(first);
        RunLock::take(dir.path()).unwrap();
    }
}
