//! Kernels with one thing wrong: the recorded results, the barriers' own check or a sanitizer must notice each.

use super::emulator::{available, source};
use super::record::{of_file, replay};

struct Mutant {
    file: &'static str,
    what: &'static str,
    from: &'static str,
    to: &'static str,
    /// Looked for by ThreadSanitizer, too: what a lucky order of threads hides.
    race: bool,
}

const fn wrong(file: &'static str, what: &'static str, from: &'static str, to: &'static str) -> Mutant {
    Mutant { file, what, from, to, race: false }
}

const fn race(file: &'static str, what: &'static str, from: &'static str, to: &'static str) -> Mutant {
    Mutant { file, what, from, to, race: true }
}

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";

const MUTANTS: &[Mutant] = &[
    wrong(
        "add",
        "one element too many",
        "if (i < n.count) {\n        put(x[i], number",
        "if (i <= n.count) {\n        put(x[i], number",
    ),
    wrong("embedding", "the last token of a row is left out", "i < end; ++i", "i + 1 < end; ++i"),
    wrong("embedding", "wrong stride", "ulong(ids[token]) * n.columns", "ulong(ids[token]) * (n.columns - 1)"),
    wrong("rms_norm", "no eps", "/ float(columns) + eps", "/ float(columns)"),
    wrong("rms_norm", "a row of the next block", "end = min(first + 64, n.rows)", "end = min(first + 65, n.rows)"),
    wrong(
        "rms_norm",
        "barrier for some",
        "if (row >= n.rows) {\n        return;",
        "if (row >= n.rows || lane == 31) {\n        return;",
    ),
    wrong("rotary", "turned the other way", "fma(a, c, -b * s)", "fma(a, c, b * s)"),
    wrong(
        "rotary",
        "positions do not start again",
        "ulong(row % n.seq) * half_dim;\n    for (uint i = lane; i < half_dim",
        "ulong(row) * half_dim;\n    for (uint i = lane; i < half_dim",
    ),
    wrong("swiglu", "wrong stride", "ulong(i / n.width) * 2 * n.width", "ulong(i / n.width) * n.width"),
    wrong("dropout", "another word", "words[j] < n.threshold", "words[3 - j] < n.threshold"),
    wrong("cross_entropy", "no target", "c == target ? p - n.scale : p", "p"),
    race(
        "cross_entropy",
        "the total before all have added",
        "sum = sum_of_group(sum, shared, lane, simdgroup, 8);\n    // The target",
        "sum = simd_sum(sum); if (lane == 0) { shared[simdgroup] = sum; } sum = shared[0];\n    // The target",
    ),
    wrong(
        "distillation",
        "no mean",
        "token_divergence(n.divergence, a, b).y - mean",
        "token_divergence(n.divergence, a, b).y",
    ),
    race(
        "distillation",
        "slopes before they are there",
        "threadgroup_barrier(mem_flags::mem_device);\n    float d = 0.0f",
        "float d = 0.0f",
    ),
    wrong("adamw", "no bias correction", "lr / one_less_exp(t * n.log_beta1)", "lr"),
    wrong("muon", "no Nesterov", "update[i] = fma(n.momentum, m, g)", "update[i] = m"),
    wrong(
        "gradient_norm",
        "a number that is left out",
        "end = min(first + PIECE, n.count)",
        "end = min(first + PIECE, n.count - 1)",
    ),
    wrong("guard", "clips nothing", "norm > n.max_norm ? n.max_norm / norm : 1.0f", "norm > n.max_norm ? 1.0f : 1.0f"),
    wrong(
        "attention",
        "a window that is one too wide",
        "t + 1 > n.window ? t + 1 - n.window : 0",
        "t > n.window ? t - n.window : 0",
    ),
    wrong("attention", "no delta", "p[i] * (row[c] - own.delta)", "p[i] * row[c]"),
    race(
        "attention",
        "keys that are not there yet",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n        multiply_rows<D, R>(queries, keys, scores);\n        float factor",
        "multiply_rows<D, R>(queries, keys, scores);\n        float factor",
    ),
    race(
        "attention",
        "keys that are overwritten too early",
        "add_rows<D, R>(scores, values, sums);\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "add_rows<D, R>(scores, values, sums);",
    ),
    race(
        "attention",
        "queries that are overwritten too early",
        "add_rows<D, R>(scores, queries, dkeys);\n            threadgroup_barrier(mem_flags::mem_threadgroup);",
        "add_rows<D, R>(scores, queries, dkeys);",
    ),
    race(
        "attention",
        "a diagonal that is not there yet",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n            scale_rows",
        "scale_rows",
    ),
    wrong(
        "attention",
        "wrong stride",
        "tile + j * 8 * (D + PAD) + i * 8, D + PAD);",
        "tile + j * 8 * (D + PAD) + i * 8, D);",
    ),
    wrong("page", "the next slot", "slot = position % 64", "slot = (position + 1) % 64"),
    wrong(
        "page",
        "the query of the window for the sinks",
        "sinks > 0 ? min(position, sinks + (window - 1)) : position",
        "position",
    ),
    race(
        "page",
        "heads before they are there",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n    if (!active)",
        "if (!active)",
    ),
    race("page", "high halves before low ones", "simdgroup_barrier(mem_flags::mem_device);", ""),
    wrong(
        "attend",
        "a window that is one too wide",
        "oldest = position + 1 > window ? position + 1 - window : 0",
        "oldest = position > window ? position - window : 0",
    ),
    wrong("attend", "a sink too few", "key < sinks);", "key + 1 < sinks);"),
    wrong("attend", "the next key is seen", "seen = key <= position &&", "seen = key <= position + 1 &&"),
    race(
        "attend",
        "weights before they are there",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n    for (uint i = lane",
        "for (uint i = lane",
    ),
    race(
        "attend",
        "sums before they are there",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n    float top",
        "float top",
    ),
    wrong("noise", "another position", "lanes[2 * output.lane + 1] + 1", "lanes[2 * output.lane + 1]"),
    wrong("noise", "one token too many", "left -= found[1]", "left -= found[1] + 1"),
    wrong("lora", "another part", "j / n.rank == places[2 * column + 1]", "j / n.rank == 0"),
    wrong("lora", "set where it is to be added", "n.scale * dspread[at], n.add", "n.scale * dspread[at], 0"),
    wrong("skinny", "no gain", "v[i] = v[i] * gain[i];", "v[i] = v[i];"),
    wrong("skinny", "wrong stride", "at += 256", "at += 512"),
    wrong("blocks", "the next row", "* n.row_bytes", "* (n.row_bytes + 1)"),
];

/// Whether a run of a mutant shows that it is one: what it does not have is a compiler's error.
fn is_caught(mutant: &Mutant, text: &str) -> bool {
    let records = of_file(mutant.file);
    let mut small: Vec<_> = records.clone();
    small.sort_by_key(|r| r.buffers.iter().map(|b| b.before.len()).sum::<usize>());
    let run = |flags: &[&str], seeds| {
        replay(mutant.file, text, &small, flags, seeds).unwrap_or_else(|e| panic!("{}: {e}", mutant.what))
    };
    if !run(&["-fsanitize=address", "-fno-sanitize-recover=all", "-Wno-error"], 3).status.success() {
        return true;
    }
    small.truncate(8);
    mutant.race && !run_threads(mutant, text, &small)
}

fn run_threads(mutant: &Mutant, text: &str, records: &[&super::emulator::Record]) -> bool {
    let flags = ["-fsanitize=thread", "-DMSL_THREADS", "-Wno-error"];
    replay(mutant.file, text, records, &flags, 1).unwrap_or_else(|e| panic!("{}: {e}", mutant.what)).status.success()
}

#[test]
fn the_sources_themselves_are_not_caught() {
    if !available() {
        return;
    }
    for file in ["cross_entropy", "page", "attend"] {
        assert!(!is_caught(&race(file, "nothing", "", ""), &source(file)), "{file}");
    }
}

#[test]
fn every_mutant_is_caught() {
    if !available() {
        return;
    }
    let mut survived = Vec::new();
    for mutant in MUTANTS {
        let text = source(mutant.file);
        assert!(text.contains(mutant.from), "{}.metal has no `{}`", mutant.file, mutant.from);
        if !is_caught(mutant, &text.replacen(mutant.from, mutant.to, 1)) {
            survived.push(format!("{}: {}", mutant.file, mutant.what));
        }
    }
    assert!(survived.is_empty(), "{survived:?}");
}

#[test]
fn a_missing_barrier_in_the_sum_of_a_threadgroup_is_caught() {
    if !available() {
        return;
    }
    // The prelude's own functions, copied into a file where they can be broken.
    let prelude = source("prelude");
    let start = prelude.find("inline float sum_of_group").unwrap();
    let own = &prelude[start..start + prelude[start..].find("\n}\n").unwrap() + 3];
    let broken = own.replacen(BARRIER, "", 1).replace("sum_of_group", "broken_sum");
    let text = format!("{broken}\n{}", source("cross_entropy").replace("sum_of_group(", "broken_sum("));
    let mutant = race("cross_entropy", "no barrier", "", "");
    assert!(is_caught(&mutant, &text));
}
