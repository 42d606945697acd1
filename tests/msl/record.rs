//! Dispatches on record: every kernel over a few shapes, as the ops hand them over, to be run again under sanitizers, in other
//! types, and over mutants.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use gpt::ops::ctx::Ctx;
use gpt::ops::gpu::kernels::ALL;
use gpt::ops::simd::Family;

use super::emulator::{Emulator, Record, compile, source};
use super::{scenes, types};

/// The dispatches of all scenes. Those that are large, or many of one function and shape, are left out.
pub fn records() -> &'static [Record] {
    static RECORDS: OnceLock<Vec<Record>> = OnceLock::new();
    RECORDS.get_or_init(|| {
        let emulator = Arc::new(Emulator::recording());
        scenes::play(&|| Ctx::gpu(emulator.clone(), Family::detect()));
        let all = emulator.records.as_ref().unwrap().lock().unwrap().clone();
        let mut kept: BTreeMap<(String, [u32; 3], Vec<usize>), Record> = BTreeMap::new();
        for record in all {
            let sizes = record.buffers.iter().map(|b| b.before.len()).collect();
            kept.insert((record.function.clone(), record.groups, sizes), record);
        }
        let mut kept: Vec<Record> = kept.into_values().collect();
        // In the narrow types the smallest of each function.
        kept.sort_by_key(|record| {
            (record.function.clone(), record.buffers.iter().map(|b| b.before.len()).sum::<usize>())
        });
        let smallest = kept.chunk_by(|a, b| a.function == b.function).map(|records| &records[0]);
        let narrow: Vec<Record> = smallest.flat_map(|record| types::narrowed(&emulator, record)).collect();
        kept.extend(narrow);
        kept
    })
}

/// The records of one file's functions.
pub fn of_file(file: &str) -> Vec<&'static Record> {
    records().iter().filter(|record| record.file == file).collect()
}

/// Every file of kernels.
pub fn files() -> Vec<&'static str> {
    let mut files: Vec<&str> = ALL.iter().map(|kernel| kernel.file).collect();
    files.sort_unstable();
    files.dedup();
    files
}

/// Writes records as emulator/replay.cc reads them.
pub fn write(name: &str, records: &[&Record]) -> PathBuf {
    let mut bytes = Vec::new();
    let word = |bytes: &mut Vec<u8>, x: usize| bytes.extend((x as u32).to_le_bytes());
    for record in records {
        word(&mut bytes, record.function.len());
        bytes.extend(record.function.as_bytes());
        record.groups.iter().for_each(|n| word(&mut bytes, *n as usize));
        word(&mut bytes, record.threads as usize);
        word(&mut bytes, record.buffers.len());
        for buffer in &record.buffers {
            bytes.extend((buffer.before.len() as u64).to_le_bytes());
            bytes.extend((buffer.offset as u64).to_le_bytes());
            word(&mut bytes, usize::from(buffer.after.is_some()));
            bytes.extend(&buffer.before);
            bytes.extend(buffer.after.iter().flatten());
        }
    }
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let (own, number) = (std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("msl/{name}.{own}.{number}.rec"));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Runs records of a file again over `text` (the file's own, or a mutant's), compiled with `flags`.
pub fn replay(file: &str, text: &str, records: &[&Record], flags: &[&str], seeds: usize) -> Result<Output, String> {
    let program = compile(file, text, &["replay.cc"], flags)?;
    let data = write(file, records);
    let done = Command::new(program).arg(&data).arg(seeds.to_string()).output().unwrap();
    std::fs::remove_file(data).unwrap();
    Ok(done)
}

/// `replay` of a file as it is, which must give the recorded bits.
#[track_caller]
pub fn must_pass(file: &str, records: &[&Record], flags: &[&str], seeds: usize) {
    let done = replay(file, &source(file), records, flags, seeds).unwrap_or_else(|e| panic!("{file}.metal:\n{e}"));
    assert!(
        done.status.success(),
        "{file}.metal, {flags:?}: {}\n{}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
}
