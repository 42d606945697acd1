//! Each command: its flags become a recipe's config, the recipe runs inside the one thread pool, the result is shown.

use std::io::Read;
use std::path::Path;

use clap::CommandFactory;
use serde::Serialize;

use super::args::{
    BenchArgs, BenchCommand, Cli, Command, DataCommand, EvalArgs, Global, SampleArgs, ScoreArgs, TrainArgs,
};
use super::terminal::{Terminal, bytes, count, duration, out};
use crate::device;
use crate::error::{Error, Result};
use crate::ops::simd::Family;
use crate::preset::{BUILT_IN, Preset};
use crate::recipes::report::Interrupt;
use crate::recipes::sample::{CacheSettings, SampleConfig, Sampling};
use crate::recipes::train::{TrainConfig, TrainSummary};
use crate::recipes::{bench, eval, info, plan, sample, train};

pub fn run(cli: Cli, interrupt: &Interrupt) -> Result<()> {
    let global = cli.global;
    device::choose(&global.device)?;
    let family = match &global.cpu_kernels {
        Some(name) => Family::named(name)?,
        None => Family::detect(),
    };
    let threads = global.threads.unwrap_or_else(device::threads);
    if threads == 0 || threads > 4096 {
        return Err(Error::usage(format!("--threads {threads}")).with_hint("use 1 up to the number of cores"));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| Error::failed(format!("starting {threads} threads: {e}")))?;
    pool.install(|| match cli.command {
        Command::Train(args) => train_command(args, &global, family, interrupt),
        Command::Sample(args) => sample_command(args, &global, family, interrupt),
        Command::Eval(args) => eval_command(args, &global, family),
        Command::Score(args) => score_command(args, &global, family),
        Command::Data(DataCommand::Info { source, validation, tokenizer }) => {
            data_info(&info::data(&source, validation, tokenizer.as_ref())?, &global)
        }
        Command::Presets { preset } => presets(preset.as_deref(), &global),
        Command::Inspect { checkpoint } => inspect(&info::inspect(checkpoint.as_ref())?, &global),
        Command::Bench(command) => bench_command(command, &global, family),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "gpt", &mut script);
            out(&String::from_utf8_lossy(&script));
            Ok(())
        }
        Command::Reference => {
            out(&super::reference::markdown());
            Ok(())
        }
    })
}

/// One JSON document on a line of its own.
fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Error::failed(format!("writing JSON: {e}")))?;
    out(&(text + "\n"));
    Ok(())
}

fn train_command(args: TrainArgs, global: &Global, family: Family, interrupt: &Interrupt) -> Result<()> {
    let config = TrainConfig {
        preset: args.preset,
        given: args.flags.given,
        out: args.out,
        resume: args.resume,
        init_from: args.init_from,
        family,
    };
    let mut terminal = Terminal::new(false);
    if args.dry_run {
        let plan = plan::dry_run(&config, &mut terminal)?;
        if global.json {
            return json(&plan);
        }
        dry_run(&plan);
        return Ok(());
    }
    let summary = train::run(&config, &mut terminal, interrupt);
    terminal.finish();
    let summary = summary?;
    train_summary(&summary, global);
    if global.json { json(&summary) } else { Ok(()) }
}

fn dry_run(plan: &plan::DryRun) {
    let needed = plan.state_bytes + plan.activation_bytes;
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
        bytes(needed),
        bytes(plan.state_bytes),
        bytes(plan.activation_bytes),
        bytes(plan.available_bytes),
    ));
    if !plan.fits {
        out(
            "does not fit: use a smaller --batch (with more --accumulate), --recompute true, a smaller --context or preset\n",
        );
    }
}

/// The end of a run in words, on stderr.
fn train_summary(s: &TrainSummary, global: &Global) {
    let place = s.out.display();
    if s.ended == "interrupted" {
        eprintln!("stopped at step {}, all saved. Go on with:\n  gpt train --resume --out {place}", s.steps);
        return;
    }
    eprint!("\n{}", s.curve);
    let number = |x: Option<f64>, digits: usize| x.map_or("-".to_owned(), |x| format!("{x:.digits$}"));
    eprintln!(
        "\nvalidation loss {} nats/token, {} bits/byte (best seen {})",
        number(s.val_loss, 4),
        number(s.val_bpb, 4),
        number(s.best_val_loss, 4)
    );
    if let (Some(val), Some(entropy), Some(source)) = (s.val_bpb, s.entropy_bpb, s.source_bpb) {
        eprintln!(
            "the data's entropy is {entropy:.4} bits/byte ({source:.4} for these held-out stories): {:.1} % above it",
            100.0 * (val / entropy - 1.0)
        );
    }
    eprintln!(
        "{} parameters, {} steps, {} tokens at {:.0} tok/s, {} in all, peak memory {}",
        count(s.parameters),
        s.steps,
        s.tokens,
        s.tokens_per_second,
        duration(s.seconds),
        bytes(s.peak_memory_bytes)
    );
    if let Some(text) = &s.sample {
        eprintln!("\na sample:\n  {}", text.trim().replace('\n', "\n  "));
    }
    eprintln!(
        "\nnext:\n  gpt sample {place}\n  gpt eval {place}\n  gpt train --resume --out {place} --steps {}",
        2 * s.steps
    );
    let _ = global;
}

fn sample_command(args: SampleArgs, global: &Global, family: Family, interrupt: &Interrupt) -> Result<()> {
    let config = SampleConfig {
        checkpoint: args.checkpoint,
        prompt: prompt(&args.prompt)?,
        max_tokens: args.max_tokens,
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
            repetition_window: args.repetition_window,
            seed: args.seed,
        },
        cache: CacheSettings { window: args.kv_window, sinks: args.kv_sinks },
        stop: args.stop,
        family,
    };
    if !global.json {
        out(&config.prompt);
    }
    let mut terminal = Terminal::new(!global.json);
    let summary = sample::run(&config, &mut terminal, interrupt)?;
    if !global.json {
        out("\n");
    }
    eprintln!(
        "prompt {} tokens in {:.3} s; {} new at {:.0} tok/s; first after {:.3} s; cache {}",
        summary.prompt_tokens,
        summary.prefill_seconds,
        summary.new_tokens,
        summary.tokens_per_second,
        summary.time_to_first_token,
        bytes(summary.cache_bytes as u64)
    );
    if global.json { json(&summary) } else { Ok(()) }
}

/// TEXT as it is, @FILE from a file, - from standard input.
fn prompt(given: &str) -> Result<String> {
    match given.strip_prefix('@') {
        Some(path) => text_file(Path::new(path)),
        None if given == "-" => text_file(Path::new("-")),
        None => Ok(given.to_owned()),
    }
}

fn text_file(path: &Path) -> Result<String> {
    let mut raw = Vec::new();
    if path == Path::new("-") {
        std::io::stdin().read_to_end(&mut raw).map_err(|e| Error::io("read", "standard input", e))?;
    } else {
        raw = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    }
    String::from_utf8(raw).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::file(path, "UTF-8 text", format!("an invalid byte at offset {at}"))
    })
}

fn eval_command(args: EvalArgs, global: &Global, family: Family) -> Result<()> {
    let EvalArgs { checkpoint, data, whole, validation, context, stride } = args;
    let config = eval::EvalConfig { checkpoint, data, whole, validation, context, stride, family };
    let s = eval::run(&config, &mut Terminal::new(false))?;
    if global.json {
        return json(&s);
    }
    out(&format!(
        "loss           {:.6} nats/token\nperplexity     {:.4}\nbits per byte  {:.6}\nover           {} tokens, {} bytes of {}\n",
        s.loss, s.perplexity, s.bits_per_byte, s.tokens, s.bytes, s.data
    ));
    if let Some(entropy) = s.entropy_bpb {
        let source = s.source_bpb.map_or(String::new(), |b| format!(" ({b:.4} for this text)"));
        let above = 100.0 * (s.bits_per_byte / entropy - 1.0);
        out(&format!("entropy        {entropy:.4} bits per byte{source}: {above:.1} % above it\n"));
    }
    Ok(())
}

fn score_command(args: ScoreArgs, global: &Global, family: Family) -> Result<()> {
    let text = match (args.text, &args.file) {
        (Some(text), _) => text,
        (None, Some(path)) => text_file(path)?,
        (None, None) => return Err(Error::usage("no text").with_hint("give --text or --file")),
    };
    let config = eval::ScoreConfig { checkpoint: args.checkpoint, text, family };
    let s = eval::score(&config, &mut Terminal::new(false))?;
    if global.json {
        return json(&s);
    }
    for token in &s.tokens {
        let logprob = token.logprob.map_or("       -".to_owned(), |l| format!("{l:8.4}"));
        out(&format!("{:6} {logprob} {:?}\n", token.id, token.text));
    }
    out(&s.loss.map_or("no token is predicted\n".to_owned(), |l| format!("loss {l:.6} nats/token\n")));
    Ok(())
}

fn data_info(d: &info::DataInfo, global: &Global) -> Result<()> {
    if global.json {
        return json(d);
    }
    out(&format!("{}: {}, {} tokens\n", d.name, bytes(d.bytes), d.tokens));
    for s in &d.splits {
        out(&format!("  {:<12}{} in {} documents, {} tokens\n", s.name, bytes(s.bytes), s.documents, s.tokens));
    }
    if let (Some(entropy), Some(source), Some([bits, length, longest])) = (d.entropy_bpb, d.source_bpb, d.story) {
        out(&format!(
            "entropy {entropy:.6} bits per byte: {bits:.3} bits over {length:.3} bytes a story, computed from the grammar\n\
             held-out stories: {source:.6} bits per byte, exact; the longest story has at most {longest} bytes with its end\n"
        ));
    }
    out(&format!("begins:\n{}\n", d.beginning));
    Ok(())
}

fn presets(name: Option<&str>, global: &Global) -> Result<()> {
    if let Some(name) = name {
        let preset = Preset::load(name)?;
        if global.json {
            return json(&preset);
        }
        out(&preset.to_toml());
        return Ok(());
    }
    let all: Vec<Preset> = BUILT_IN.iter().map(|(name, _)| Preset::load(name)).collect::<Result<_>>()?;
    if global.json {
        return json(&all);
    }
    out("preset       layers  hidden  heads    ffn  context  batch  parameters (byte vocabulary)\n");
    for p in &all {
        let m = &p.model;
        let parameters = count(p.gpt_config(320)?.parameters());
        out(&format!(
            "{:<12} {:>6} {:>7} {:>6} {:>6} {:>8} {:>6}  {parameters}\n",
            p.name,
            m.num_hidden_layers,
            m.hidden_size,
            m.num_attention_heads,
            m.intermediate_size,
            m.max_position_embeddings,
            p.train.batch * p.train.accumulate
        ));
    }
    Ok(())
}

fn inspect(i: &info::Inspection, global: &Global) -> Result<()> {
    if global.json {
        return json(i);
    }
    out(&format!("{}: {} ({}), {} parameters\n", i.checkpoint.display(), i.model_type, i.kind, count(i.parameters)));
    for t in &i.tensors {
        out(&format!("  {:<52} {:<6} {:?}\n", t.name, t.dtype, t.shape));
    }
    Ok(())
}

fn bench_command(command: BenchCommand, global: &Global, family: Family) -> Result<()> {
    let config = |args: BenchArgs| {
        if !["auto", "f32"].contains(&args.dtype.as_str()) {
            let what = format!("dtype `{}` is not available in this version", args.dtype);
            return Err(Error::usage(what).with_hint("use --dtype f32"));
        }
        let pair = |text: &String| match text.split_once('=') {
            Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
            None => Err(Error::usage(format!("--set {text}")).with_hint("expected KEY=VALUE")),
        };
        let given = args.set.iter().map(pair).collect::<Result<_>>()?;
        let BenchArgs { preset, batch, context, steps, .. } = args;
        Ok(bench::BenchConfig { preset, given, batch, context, steps, family })
    };
    let s = match command {
        BenchCommand::Train(args) => bench::train(&config(args)?)?,
        BenchCommand::Decode(args) => bench::decode(&config(args)?)?,
    };
    if !global.json {
        out(&format!(
            "{} {} batch {} context {} {} on {} threads ({}): {:.0} tok/s, {:.2} ms a step, {:.3} TFLOP/s, {:.1} GB/s, peak {}\n",
            s.mode,
            s.preset,
            s.batch,
            s.context,
            s.dtype,
            s.threads,
            s.kernels,
            s.tokens_per_second,
            s.milliseconds_per_step,
            s.tflops,
            s.gbytes_per_second,
            bytes(s.peak_memory_bytes)
        ));
        return Ok(());
    }
    json(&s)
}
