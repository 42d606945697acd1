//! The folder where downloads and prepared data are kept, and the right to write one thing in it.
//!
//! ```text
//! <cache>/downloads/<set>/<file>     as served, with <file>.sha256 beside it
//! <cache>/texts/<key>/               documents in one text, see `store`
//! <cache>/tokens/<key>.tok           ids, see `token_file`
//! ```
//!
//! Everything in it can be made again: it may be deleted at any time when no run uses it.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use super::progress::Progress;
use crate::error::{Error, Result};
use crate::files::atomic;

/// The environment variable that names the folder.
pub const VARIABLE: &str = "GPT_CACHE";

/// Where everything that can be made again is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(PathBuf);

impl Place {
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// `GPT_CACHE`, else the system's: `~/Library/Caches/gpt` on macOS, `$XDG_CACHE_HOME/gpt` or `~/.cache/gpt` elsewhere.
    pub fn of_user() -> Self {
        let named = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = || named("HOME").or_else(|| named("USERPROFILE"));
        let system = || match cfg!(target_os = "macos") {
            true => home().map(|home| home.join("Library/Caches/gpt")),
            // The specification has relative paths ignored.
            false => named("XDG_CACHE_HOME")
                .filter(|path| path.is_absolute())
                .or_else(|| home().map(|home| home.join(".cache")))
                .map(|cache| cache.join("gpt")),
        };
        Self(named(VARIABLE).or_else(system).unwrap_or_else(|| std::env::temp_dir().join("gpt-cache")))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A folder in it, made if there is none.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.0.join(name);
        let hint = format!("{VARIABLE} names another folder for downloads and prepared data");
        atomic::create_folder(&folder).map_err(|e| Error::failed(e.to_string()).with_hint(hint))?;
        Ok(folder)
    }
}

/// The right to write one file or folder, which the system gives up with the process, however it ends.
#[derive(Debug)]
pub struct Claim {
    _file: File,
}

impl Claim {
    /// Waits until nobody else writes `path`. The lock file beside it stays: removing it would let two writers in.
    pub fn take(path: &Path, progress: &mut dyn Progress) -> Result<Self> {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let path = Path::new(&name);
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = open.map_err(|e| Error::io("open", path, e))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                // Some network disks have no locks; to work without one there is better than not to work.
                Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => {
                    return Ok(Self { _file: file });
                }
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", path, e)),
                Err(TryLockError::WouldBlock) => {}
            }
            if !told {
                progress.note(format!("waiting for another process that makes {}", path.with_extension("").display()));
                told = true;
            }
            progress.at(0)?;
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::progress::Told;

    #[test]
    fn a_second_writer_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let first = Claim::take(&path, &mut Told::default()).unwrap();
        let (told, seen) = std::sync::mpsc::channel();
        struct Live(std::sync::mpsc::Sender<String>);
        impl Progress for Live {
            fn begin(&mut self, _: &str, _: Option<u64>) {}
            fn at(&mut self, _: u64) -> Result<()> {
                Ok(())
            }
            fn end(&mut self) {}
            fn note(&mut self, text: String) {
                self.0.send(text).unwrap();
            }
        }
        let second = std::thread::spawn(move || Claim::take(&path, &mut Live(told)).map(|_| ()));
        assert!(seen.recv().unwrap().contains("another process"));
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap().unwrap();
    }
}
