//! Numbers and results in words: what commands print when nobody asked for JSON.

use super::terminal::{err, out};
use crate::error::Result;
use crate::preset::{BUILT_IN, Preset};
use crate::recipes::bench::{BenchSummary, Counted};
use crate::recipes::data::{DataInfo, Fetched, List, Shown};
use crate::recipes::distill::DistillSummary;
use crate::recipes::doctor::Diagnosis;
use crate::recipes::doctor::metal::{Check, Kernels};
use crate::recipes::eval::{EvalSummary, ScoreSummary};
use crate::recipes::finetune::FinetuneSummary;
use crate::recipes::inspect::Inspection;
use crate::recipes::merge::MergeSummary;
use crate::recipes::plan::DryRun;
use crate::recipes::sample::SampleSummary;
use crate::recipes::tokenizer;
use crate::recipes::train::TrainSummary;

/// "1h02m", "3m20s", "45s".
pub fn duration(seconds: f64) -> String {
    let s = if seconds.is_finite() { seconds.max(0.0).round() as u64 } else { 0 };
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d{:02}h", s / 86_400, s / 3600 % 24),
    }
}

/// "950", "25.4k", "1.52M": at most five characters for up to a milliard.
pub fn rate(per_second: f64) -> String {
    let n = if per_second.is_finite() { per_second.max(0.0) } else { 0.0 };
    match n {
        ..1e3 => format!("{n:.0}"),
        ..1e5 => format!("{:.1}k", n / 1e3),
        ..1e6 => format!("{:.0}k", n / 1e3),
        _ => format!("{:.2}M", n / 1e6),
    }
}

/// "12.3 MB".
pub fn bytes(n: u64) -> String {
    let x = n as f64;
    match x {
        1e9.. => format!("{:.1} GB", x / 1e9),
        1e6.. => format!("{:.1} MB", x / 1e6),
        1e3.. => format!("{:.1} kB", x / 1e3),
        _ if n == 1 => "1 byte".into(),
        _ => format!("{n} bytes"),
    }
}

/// "10.7 M".
pub fn count(n: usize) -> String {
    let n = n as f64;
    match n {
        1e9.. => format!("{:.2} G", n / 1e9),
        1e6.. => format!("{:.2} M", n / 1e6),
        1e3.. => format!("{:.1} k", n / 1e3),
        _ => format!("{n}"),
    }
}

/// How far a loss is above what no model can beat.
fn above(bits_per_byte: f64, entropy: f64) -> String {
    format!("{:.1} % above it", 100.0 * (bits_per_byte / entropy - 1.0))
}

/// What a run would be, and what would not fit.
pub fn dry_run(plan: &DryRun) {
    out(&format!(
        "preset      {}, into {}\nparameters  {}\nsteps       {} of {} tokens, {:.2} passes over {} tokens ({} held out)\n\
         compute     {:.1} MFLOP a token\nmemory      {} ({} weights and optimizer, {} activations); {} available\n",
        plan.preset,
        plan.out.display(),
        count(plan.parameters),
        plan.steps,
        plan.tokens_per_step,
        plan.epochs,
        plan.train_tokens,
        plan.val_tokens,
        plan.flops_per_token / 1e6,
        bytes(plan.state_bytes + plan.activation_bytes),
        bytes(plan.state_bytes),
        bytes(plan.activation_bytes),
        bytes(plan.available_bytes),
    ));
    if !plan.fits {
        let ways = "a smaller --batch (with more --accumulate), --recompute, a smaller --context or preset";
        out(&format!("does not fit: use {ways}\n"));
    }
}

/// The end of a run: on stdout, or beside the JSON document on stderr.
pub fn train(s: &TrainSummary, json: bool) {
    let text = train_text(s);
    if json { err(&text) } else { out(&(text + "\n")) }
}

/// How a student came out.
pub fn distill(s: &DistillSummary, json: bool) {
    let tell = if json { err } else { |line: &str| out(&format!("{line}\n")) };
    let (place, teacher) = (quoted(&s.train.out.display().to_string()), quoted(&s.teacher.display().to_string()));
    let again = format!("gpt distill --teacher {teacher} --resume --out {place}");
    if s.train.ended == "interrupted" {
        return tell(&stopped(&s.train, &again));
    }
    let mut text = outcome(&s.train);
    if let (Some(loss), Some(bpb)) = (s.teacher_val_loss, s.teacher_val_bpb) {
        text += &format!("the teacher      {loss:.4} nats/token, {bpb:.4} bits/byte\n");
    }
    for (name, rate, speedup) in [
        ("temperature 0.8", s.acceptance_rate, s.speedup),
        ("temperature 0", s.acceptance_rate_greedy, s.speedup_greedy),
    ] {
        if let (Some(rate), Some(speedup)) = (rate, speedup) {
            let percent = 100.0 * rate;
            text += &format!("as its draft     {percent:.0} % accepted at {name}, {speedup:.2} times the speed\n");
        }
    }
    let draft = if s.is_found { String::new() } else { format!(" --draft {place}") };
    tell(&format!(
        "{text}\nnext:\n  gpt sample {teacher}{draft}\n  gpt eval {place}\n  {again} --steps {}",
        2 * s.train.steps
    ));
}

/// How a model that was fine-tuned came out.
pub fn finetune(s: &FinetuneSummary, json: bool) {
    let tell = if json { err } else { |line: &str| out(&format!("{line}\n")) };
    let (place, base) = (quoted(&s.train.out.display().to_string()), quoted(&s.base.display().to_string()));
    let full = if s.lora.is_none() { " --full" } else { "" };
    let again = format!("gpt finetune {base}{full} --resume --out {place}");
    if s.train.ended == "interrupted" {
        return tell(&stopped(&s.train, &again));
    }
    let mut text = outcome(&s.train);
    if let Some(loss) = s.base_val_loss {
        text += &format!("the base         {loss:.4} nats/token\n");
    }
    if let Some(lora) = &s.lora {
        let share = 100.0 * s.trained_parameters as f64 / s.train.parameters as f64;
        let trained = count(s.trained_parameters);
        text += &format!("trained          {trained} numbers ({share:.1} % of the base), rank {}\n", lora.rank);
    }
    let sum: String = s.base_sha256.chars().take(12).collect();
    text += &format!("the base is unchanged: {}, sha256 {sum}...\n", s.base.display());
    if let Some(sample) = &s.train.sample {
        text += &format!("\na sample:\n  {}\n", sample.trim().replace('\n', "\n  "));
    }
    text += &format!("\nnext:\n  gpt sample {place}\n  gpt eval {place}\n");
    if s.lora.is_some() {
        text += &format!("  gpt sample {base} --adapter {place}:0.5\n  gpt merge {place} --out {place}-merged\n");
    }
    tell(&format!("{text}  {again} --steps {}", 2 * s.train.steps));
}

/// A model made of a base and adapters.
pub fn merged(s: &MergeSummary) {
    let adapters: Vec<String> =
        s.adapters.iter().map(|a| format!("{} (rank {}, scale {})", a.path.display(), a.rank, a.scale)).collect();
    out(&format!("{} with {}\n", s.base.display(), adapters.join(" and ")));
    out(&format!("is {} now: {} parameters in {}\n", s.out.display(), count(s.parameters), s.dtype));
    out(&format!("\nnext:\n  gpt sample {}\n", quoted(&s.out.display().to_string())));
}

/// What an interrupted run says.
fn stopped(s: &TrainSummary, again: &str) -> String {
    format!("stopped at step {}, all saved. Go on with:\n  {again}", s.steps)
}

fn train_text(s: &TrainSummary) -> String {
    let place = quoted(&s.out.display().to_string());
    let again = format!("gpt train --resume --out {place}");
    if s.ended == "interrupted" {
        return stopped(s, &again);
    }
    let mut text = outcome(s);
    if let Some(sample) = &s.sample {
        text += &format!("\na sample:\n  {}\n", sample.trim().replace('\n', "\n  "));
    }
    text + &format!("\nnext:\n  gpt sample {place}\n  gpt eval {place}\n  {again} --steps {}", 2 * s.steps)
}

/// The curve, the losses and what the run took.
fn outcome(s: &TrainSummary) -> String {
    let place = quoted(&s.out.display().to_string());
    let number = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.4}"));
    let mut text = format!("\n{}\n", s.curve);
    text += &format!("validation loss  {} nats/token, {} bits/byte", number(s.val_loss), number(s.val_bpb));
    if s.best_val_loss.is_some() && s.best_val_loss < s.val_loss {
        text += &format!("; best {}, kept in {place}/best", number(s.best_val_loss));
    }
    if let (Some(val), Some(entropy)) = (s.val_bpb, s.entropy_bpb) {
        let source = s.source_bpb.map_or(String::new(), |b| format!(" ({b:.4} for this held-out text)"));
        text += &format!("\nentropy of data  {entropy:.4} bits/byte{source}: the model is {}", above(val, entropy));
    }
    text + &format!(
        "\nrun              {} parameters, {} steps, {} tokens at {} tok/s, {} in all, peak memory {}\n",
        count(s.parameters),
        s.steps,
        s.tokens,
        rate(s.tokens_per_second),
        duration(s.seconds),
        bytes(s.peak_memory_bytes)
    )
}

/// A path as a shell takes it.
fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%".contains(c);
    if !path.is_empty() && path.chars().all(plain) { path.into() } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

/// The statistics of a sample, on stderr: the text itself is on stdout.
pub fn sample(s: &SampleSummary) {
    let rows = if s.rows.len() > 1 { format!("{} rows, ", s.rows.len()) } else { String::new() };
    let flags = if s.cache_flags.is_empty() { String::new() } else { format!(" ({})", s.cache_flags) };
    err(&format!(
        "{rows}prompt {} tokens in {:.3} s; {} new at {} tok/s; first after {:.3} s; cache {}{flags}",
        s.prompt_tokens,
        s.prefill_seconds,
        s.new_tokens,
        rate(s.tokens_per_second),
        s.time_to_first_token,
        bytes(s.cache_bytes as u64)
    ));
    if let Some(d) = &s.speculation {
        let speedup = d.speedup.map_or(String::new(), |x| format!("; {x:.2} times the speed without it"));
        err(&format!(
            "draft {}: {:.0} % of {} proposed tokens accepted, {:.2} tokens a step of the model{speedup}",
            d.draft,
            100.0 * d.acceptance_rate,
            d.draft_tokens,
            d.tokens_per_target_step,
        ));
    }
    if s.verified == Some(true) {
        err("verified: one row at a time without a draft gives the same tokens");
    }
}

/// Errors and speeds of a GPU's kernels.
pub fn kernels(k: &Kernels) {
    out(&format!("device      {}\n", k.device));
    for check in &k.checks {
        let verdict = if check.passed { "ok" } else { "WRONG" };
        let Check { name, error, allowed, milliseconds, .. } = check;
        out(&format!("{verdict:<6} {name:<34} error {error:<9.1e} of {allowed:<9.1e} {milliseconds:>9.3} ms\n"));
        if let Some(failure) = &check.failure {
            out(&format!("       {failure}\n"));
        }
    }
    let wrong = k.checks.iter().filter(|check| !check.passed).count();
    let all = k.checks.len();
    out(&if wrong == 0 { format!("all {all} agree with the CPU\n") } else { format!("{wrong} of {all} are wrong\n") });
}

/// What a token costs on a GPU.
pub fn counts(c: &Counted) {
    out(&format!(
        "{} of {} layers as {}, {} rows, averages of {} tokens\n\
         dispatches       {} ({} a layer)\nbindings         {}\ncommand buffers  {}\nencoders         {}\n\
         bytes to the GPU {}\nbytes back       {}\n",
        c.preset,
        c.layers,
        c.dtype,
        c.batch,
        c.tokens,
        c.dispatches,
        c.dispatches_per_layer,
        c.bindings,
        c.command_buffers,
        c.encoders,
        c.uploaded_bytes,
        c.downloaded_bytes,
    ));
}

/// What a checkpoint needs here.
pub fn doctor(d: &Diagnosis) {
    let need = &d.need;
    out(&format!(
        "checkpoint  {} as {}\ndevice      {} ({}), {} kernels on {} threads\nmemory      {}, {} available\n\
         needed      {} for {} of {} tokens: {} weights, {} cache, {} workspace\n",
        d.checkpoint.display(),
        d.weight_type,
        d.device,
        d.reason,
        d.kernels,
        d.threads,
        bytes(d.memory_bytes),
        bytes(d.available_bytes),
        bytes(need.total()),
        if d.rows == 1 { "a row".to_owned() } else { format!("{} rows", d.rows) },
        d.positions,
        bytes(need.weight_bytes),
        bytes(need.cache_bytes),
        bytes(need.workspace_bytes),
    ));
    match &d.advice {
        None => out(&format!("fits        into {}\n", bytes(d.budget_bytes))),
        Some(advice) => out(&format!("too much    for {}: {advice}\n", bytes(d.budget_bytes))),
    }
    match d.locked {
        Some(true) => out("locking     works\n"),
        Some(false) => out("locking     is not permitted: raise the limit (`ulimit -l unlimited`)\n"),
        None => {}
    }
}

pub fn eval(s: &EvalSummary) {
    out(&format!(
        "loss           {:.6} nats/token\nperplexity     {:.4}\nbits per byte  {:.6}\nover           {} tokens, {} bytes of {}\n",
        s.loss, s.perplexity, s.bits_per_byte, s.tokens, s.bytes, s.data
    ));
    if let Some(entropy) = s.entropy_bpb {
        let source = s.source_bpb.map_or(String::new(), |b| format!(" ({b:.4} for this text)"));
        let above = above(s.bits_per_byte, entropy);
        out(&format!("entropy        {entropy:.4} bits per byte{source}: the model is {above}\n"));
    }
}

pub fn score(s: &ScoreSummary) {
    for token in &s.tokens {
        let logprob = token.logprob.map_or("       -".to_owned(), |l| format!("{l:8.4}"));
        out(&format!("{:6} {logprob} {:?}\n", token.id, token.text));
    }
    out(&s.loss.map_or("no token is predicted\n".to_owned(), |l| format!("loss {l:.6} nats/token\n")));
}

pub fn data(d: &DataInfo) {
    if let Some(card) = &d.card {
        out(&format!("{}\nlicence {}\n", card.title, card.licence));
        card.homepage.iter().for_each(|page| out(&format!("see     {page}\n")));
        card.notes.iter().for_each(|notes| out(&format!("{notes}\n")));
        if !card.fetched {
            let size = d.bytes.map_or(String::new(), |n| format!(", about {} of text", bytes(n)));
            out(&format!("not fetched yet{size}: {}\n", card.command));
            return;
        }
    }
    let tokens = d.tokens.unwrap_or(0);
    out(&format!("{}: {}, {tokens} tokens\n", d.name, bytes(d.bytes.unwrap_or(0))));
    let several = d.splits.iter().any(|s| s.source != d.splits[0].source);
    for s in &d.splits {
        let name = if several { format!("{} {}", s.source, s.name) } else { s.name.to_owned() };
        out(&format!("  {name:<12} {} in {} documents, {} tokens\n", bytes(s.bytes), s.documents, s.tokens));
    }
    if let (Some(entropy), Some(source), Some([bits, length, longest])) = (d.entropy_bpb, d.source_bpb, d.story) {
        out(&format!(
            "entropy {entropy:.6} bits per byte: {bits:.3} bits over {length:.3} bytes a story, computed from the grammar\n\
             held-out stories: {source:.6} bits per byte, exact; the longest story has at most {longest} bytes with its end\n"
        ));
    }
    out(&format!("begins:\n{}\n", d.beginning));
}

/// The named sets as a table.
pub fn data_list(list: &List) {
    out("set             text       in the cache  what\n");
    for set in &list.sets {
        let size = set.text_bytes.map_or("-".to_owned(), bytes);
        let fetched = if set.fetched { "yes" } else { "no" };
        out(&format!("{:<15} {size:<10} {fetched:<13} {}\n", set.name, set.title));
    }
    out(&format!("\nThe cache is {} ({} names another).\n", list.cache.display(), crate::recipes::data::CACHE));
}

pub fn fetched(f: &Fetched) {
    f.files.iter().for_each(|file| out(&format!("{}\n", file.display())));
}

/// Documents with a line between them.
pub fn documents(shown: &Shown) {
    for (i, document) in shown.documents.iter().enumerate() {
        out(&format!("{}{document}\n", if i > 0 { "---\n" } else { "" }));
    }
}

pub fn tokenizer_trained(t: &tokenizer::TrainSummary) {
    out(&format!(
        "{} ids from {}, {:.3} bytes a token, in {}\nnext: gpt train --tokenizer {}\n",
        t.vocab_size,
        bytes(t.bytes),
        t.bytes_per_token,
        duration(t.seconds),
        t.out.display()
    ));
}

pub fn tokenizer(t: &tokenizer::Shown) {
    out(&format!("{}: {} ids, the text ends with {}\n", t.tokenizer.display(), t.vocab_size, t.end_of_text));
    t.bytes_per_token.iter().for_each(|n| out(&format!("{n:.3} bytes a token\n")));
    match &t.tokens {
        Some(tokens) => tokens.iter().for_each(|(id, text)| out(&format!("{id:6} {text:?}\n"))),
        None => {
            out("longest tokens:\n");
            t.longest.iter().for_each(|(id, text)| out(&format!("{id:6} {text:?}\n")));
        }
    }
}

/// The table of built-in presets.
pub fn presets(all: &[Preset]) -> Result<()> {
    out("preset       layers  hidden  heads    ffn  context  batch   steps  parameters (byte vocabulary)\n");
    for p in all {
        let m = &p.model;
        out(&format!(
            "{:<12} {:>6} {:>7} {:>6} {:>6} {:>8} {:>6} {:>7}  {}\n",
            p.name,
            m.num_hidden_layers,
            m.hidden_size,
            m.num_attention_heads,
            m.intermediate_size,
            m.max_position_embeddings,
            p.train.batch * p.train.accumulate,
            p.train.steps,
            count(p.gpt_config(320)?.parameters())
        ));
    }
    out("\n`gpt presets NAME` prints one as TOML; `gpt train --preset FILE.toml` takes your own.\n");
    Ok(())
}

/// A preset as TOML; a built-in one with the comment at its head.
pub fn preset(preset: &Preset) {
    let built_in = BUILT_IN.iter().find(|(name, _)| *name == preset.name);
    match built_in.filter(|(name, _)| Preset::load(name).is_ok_and(|p| p == *preset)) {
        Some((_, text)) => out(text),
        None => out(&preset.to_toml()),
    }
}

pub fn inspection(i: &Inspection) {
    out(&format!("{}: {} ({}), {} parameters\n", i.checkpoint.display(), i.model_type, i.kind, count(i.parameters)));
    for t in &i.tensors {
        out(&format!("  {:<52} {:<6} {:?}\n", t.name, t.dtype, t.shape));
    }
}

pub fn bench(s: &BenchSummary) {
    let what = format!("{} {} batch {} context {} {}", s.mode, s.preset, s.batch, s.context, s.dtype);
    let percent = |share: f64| share * 100.0;
    out(&format!(
        "{what} on {} threads ({}): {:.0} tok/s, {:.2} ms a step, peak {}\n\
         {:.3} TFLOP/s, {:.0} % of a large product's {:.3}; {:.1} GB/s of weights, {:.0} % of a plain read's {:.1}\n",
        s.threads,
        s.kernels,
        s.tokens_per_second,
        s.milliseconds_per_step,
        bytes(s.peak_memory_bytes),
        s.tflops,
        percent(s.matmul_share),
        s.matmul_tflops,
        s.gbytes_per_second,
        percent(s.stream_share),
        s.stream_gbytes_per_second,
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well_at_every_size() {
        assert_eq!(
            [0.4, 59.6, 3599.0, 7380.0, 100_000.0, f64::NAN].map(duration),
            ["0s", "1m00s", "59m59s", "2h03m", "1d03h", "0s"]
        );
        assert_eq!(
            [0.0, 999.4, 25_432.0, 250_000.0, 1.52e6, f64::INFINITY].map(rate),
            ["0", "999", "25.4k", "250k", "1.52M", "0"]
        );
        assert_eq!([1, 0, 999, 12_345_678].map(bytes), ["1 byte", "0 bytes", "999 bytes", "12.3 MB"]);
        assert_eq!([999, 10_745_472].map(count), ["999", "10.75 M"]);
    }

    #[test]
    fn commands_to_try_survive_a_shell() {
        assert_eq!(quoted("checkpoints/tiny-2"), "checkpoints/tiny-2");
        assert_eq!(quoted("my runs/it's"), r"'my runs/it'\''s'");
    }
}
