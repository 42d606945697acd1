//! Writing a file so that it is either the old one or the whole new one, whatever happens in between.
//!
//! Used for every file of a run: `model_folder` and the run's own files replace one by rename, `steps` renames a folder.
//! What must stay true: nothing gets its final name before its bytes are on the disk, and the folder is synced after.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Files and folders whose names begin so were never finished; the next writer removes them.
pub const TEMPORARY: &str = ".tmp-";

/// A file in the making: counts and hashes what goes through, and names its path in every error.
pub struct Sink<'a> {
    path: &'a Path,
    file: BufWriter<File>,
    hash: Sha256,
    bytes: u64,
}

impl Sink<'_> {
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::io("write", self.path, e))
    }
}

/// What fills a file. Tensors are streamed: a save needs no second copy of the model in memory.
pub trait Fill {
    fn fill(&self, sink: &mut Sink) -> Result<()>;
}

impl Fill for [u8] {
    fn fill(&self, sink: &mut Sink) -> Result<()> {
        sink.write(self)
    }
}

impl Fill for Vec<u8> {
    fn fill(&self, sink: &mut Sink) -> Result<()> {
        sink.write(self)
    }
}

impl<F: Fill + ?Sized> Fill for &F {
    fn fill(&self, sink: &mut Sink) -> Result<()> {
        (*self).fill(sink)
    }
}

/// Size and sha256 (hexadecimal) of a file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    pub sha256: String,
}

/// Writes `content` to `path`: a temporary file beside it, fsync, rename, fsync of the folder.
pub fn write(path: &Path, content: impl Fill) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!("{TEMPORARY}{}-{name}", std::process::id()));
    let written = create(&temporary, content)
        .and_then(|_| std::fs::rename(&temporary, path).map_err(|e| Error::io("replace", path, e)));
    if written.is_err() {
        // It may not exist; the first error is the one to tell.
        let _ = std::fs::remove_file(&temporary);
    }
    written.and_then(|()| sync_folder(folder))
}

/// Writes a file and waits until it is on the disk.
pub fn create(path: &Path, content: impl Fill) -> Result<Written> {
    let file = File::create(path).map_err(|e| Error::io("create", path, e))?;
    let mut sink = Sink { path, file: BufWriter::with_capacity(1 << 18, file), hash: Sha256::new(), bytes: 0 };
    content.fill(&mut sink)?;
    let Sink { mut file, hash, bytes, .. } = sink;
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(|e| Error::io("write", path, e))?;
    Ok(Written { bytes, sha256: hex(&hash.finalize()) })
}

/// The sha256 of a file, hexadecimal.
pub fn sha256(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    hash_file(path, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

/// Adds the content of a file to a hash.
pub fn hash_file(path: &Path, hash: &mut Sha256) -> Result<()> {
    let unreadable = |e| Error::io("read", path, e);
    let mut file = File::open(path).map_err(unreadable)?;
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block).map_err(unreadable)? {
            0 => return Ok(()),
            n => hash.update(&block[..n]),
        }
    }
}

/// Bytes as lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Makes a folder and its missing parents, so that they last.
pub fn create_folder(folder: &Path) -> Result<()> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    // Another process may make it right now: what exists is looked at once more.
    if folder.exists() && !folder.is_dir() {
        return Err(Error::file(folder, "a folder", "a file").with_hint("name another place"));
    }
    let parent = folder.parent().unwrap_or(Path::new("."));
    create_folder(parent)?;
    match std::fs::create_dir(folder) {
        Err(e) if !(e.kind() == ErrorKind::AlreadyExists && folder.is_dir()) => Err(Error::io("create", folder, e)),
        _ => sync_folder(parent),
    }
}

/// Waits until the names in a folder are on the disk.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match File::open(folder).and_then(|f| f.sync_all()) {
        // Some systems and network disks cannot sync a folder; a rename is still all or nothing there.
        Err(e)
            if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::PermissionDenied | ErrorKind::Unsupported) =>
        {
            Ok(())
        }
        other => other.map_err(|e| Error::io("sync", folder, e)),
    }
}

/// Removes what killed writers left in a folder. Only for the one writer of the run.
pub fn sweep(folder: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|e| Error::io("read", folder, e))?,
    };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Removes a file, or a folder with all that is in it; fine if there is none.
pub fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes half and fails.
    struct Half;

    impl Fill for Half {
        fn fill(&self, sink: &mut Sink) -> Result<()> {
            sink.write(b"half")?;
            Err(Error::failed("stopped"))
        }
    }

    #[test]
    fn a_failing_write_leaves_the_old_file_and_no_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        write(&path, b"old".to_vec()).unwrap();
        assert!(write(&path, Half).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_written_is_counted_and_hashed() {
        let dir = tempfile::tempdir().unwrap();
        let written = create(&dir.path().join("x"), b"abc".to_vec()).unwrap();
        assert_eq!(written.bytes, 3);
        // The known answer of FIPS 180 for "abc".
        assert_eq!(written.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn sweeping_takes_only_what_was_never_finished() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), "x").unwrap();
        std::fs::write(dir.path().join(".tmp-77-model.safetensors"), "x").unwrap();
        std::fs::create_dir_all(dir.path().join(".tmp-000040/deep")).unwrap();
        sweep(dir.path()).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["model.safetensors"]);
        sweep(&dir.path().join("none")).unwrap();
    }

    #[test]
    fn a_full_disk_names_the_file_and_what_to_do() {
        // Linux has it (elsewhere there is nothing to test with): every write to it fails as on a full disk.
        let full = Path::new("/dev/full");
        if !full.exists() {
            return;
        }
        // Short content fails at the flush, long content while it is written.
        for length in [100, 1 << 20] {
            let error = create(full, vec![1; length]).unwrap_err();
            assert!(error.to_string().contains("/dev/full"), "{error}");
            assert!(error.hint().unwrap().contains("space"), "{error:?}");
        }
    }
}
