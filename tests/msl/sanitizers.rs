//! Every recorded dispatch again: in several orders of the threads, under AddressSanitizer, and, where a kernel has threadgroup
//! memory or barriers, with system threads under ThreadSanitizer. Results must have the recorded bits.

use super::emulator::{Record, available, source};
use super::record::{files, must_pass, of_file, records};

/// Bytes and threads of a dispatch: what its run costs.
fn weight(record: &Record) -> usize {
    let bytes: usize = record.buffers.iter().map(|b| b.before.len()).sum();
    bytes / 64 + record.groups.iter().product::<u32>() as usize * record.threads as usize
}

/// The lightest records of each function of a file.
fn lightest(file: &str, most: usize) -> Vec<&'static Record> {
    let mut records = of_file(file);
    records.sort_by_key(|record| (record.function.clone(), weight(record)));
    let by_function = records.chunk_by(|a, b| a.function == b.function);
    by_function.flat_map(|records| records.iter().take(most).copied()).collect()
}

#[test]
fn the_order_of_threads_changes_no_bit_and_no_kernel_leaves_its_buffers() {
    if !available() {
        return;
    }
    for file in files() {
        must_pass(file, &lightest(file, 3), &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], 3);
    }
}

#[test]
fn no_kernel_with_threadgroup_memory_has_a_race() {
    if !available() {
        return;
    }
    for file in files().into_iter().filter(|file| source(file).contains("threadgroup ")) {
        must_pass(file, &lightest(file, 1), &["-fsanitize=thread", "-DMSL_THREADS"], 1);
    }
}

#[test]
fn every_function_is_on_record() {
    if !available() {
        return;
    }
    let recorded: std::collections::BTreeSet<&str> = records().iter().map(|r| r.function.as_str()).collect();
    let all = gpt::ops::gpu::kernels::ALL.iter().flat_map(|kernel| kernel.functions());
    let missing: Vec<String> = all.filter(|function| !recorded.contains(function.as_str())).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
