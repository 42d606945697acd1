//! Writing a file so that it is either the old one or the whole new one, whatever happens in between.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::error::{Error, Result};

/// Writes `bytes` to `path`: a temporary file beside it, fsync, rename, fsync of the folder.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", std::process::id()));
    let written = create(&temporary, bytes).and_then(|()| {
        std::fs::rename(&temporary, path).map_err(|e| Error::io("rename", path, e))
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.and_then(|()| sync_folder(folder))
}

/// Writes a new file and waits until it is on the disk.
pub fn create(path: &Path, bytes: &[u8]) -> Result<()> {
    let wrap = |e| Error::io("write", path, e);
    let mut file = File::create(path).map_err(wrap)?;
    file.write_all(bytes).map_err(wrap)?;
    file.sync_all().map_err(wrap)
}

/// Waits until the names in a folder are on the disk.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync", folder, e))
}
