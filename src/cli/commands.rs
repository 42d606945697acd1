//! Each command: its flags become a recipe's config, the recipe runs inside the one thread pool, the result is shown.

use std::io::Read;
use std::path::Path;

use clap::CommandFactory;
use serde::Serialize;

use super::args::{
    BenchArgs, BenchCommand, Cli, Command, DataCommand, EvalArgs, Global, SampleArgs, ScoreArgs, TrainArgs,
};
use super::terminal::{Terminal, out};
use super::{flags, show};
use crate::device;
use crate::error::{Error, Result};
use crate::ops::simd::Family;
use crate::preset::{BUILT_IN, Preset};
use crate::recipes::report::Interrupt;
use crate::recipes::sample::{CacheSettings, SampleConfig, Sampling, WeightType};
use crate::recipes::train::TrainConfig;
use crate::recipes::{bench, eval, info, plan, sample, train};

/// Runs one command to its end.
pub fn run(cli: Cli, interrupt: &Interrupt) -> Result<()> {
    let global = cli.global;
    device::choose(&global.device)?;
    let family = match &global.cpu_kernels {
        Some(name) => Family::named(name)?,
        None => Family::detect(),
    };
    let threads = device::threads(global.threads)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| Error::failed(format!("starting {threads} threads: {e}")))?;
    pool.install(|| match cli.command {
        Command::Train(args) => train_command(args, &global, family, interrupt),
        Command::Sample(args) => sample_command(args, &global, family, interrupt),
        Command::Eval(args) => eval_command(args, &global, family),
        Command::Score(args) => score_command(args, &global, family),
        Command::Data(DataCommand::Info { source, validation, tokenizer }) => {
            print(&info::data(&source, validation, tokenizer.as_ref())?, &global, show::data)
        }
        Command::Presets { preset } => presets(preset.as_deref(), &global),
        Command::Inspect { checkpoint } => print(&info::inspect(checkpoint.as_ref())?, &global, show::inspection),
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

/// One JSON document on a line of its own, or the same in words.
fn print<T: Serialize + ?Sized>(value: &T, global: &Global, words: impl FnOnce(&T)) -> Result<()> {
    if !global.json {
        words(value);
        return Ok(());
    }
    let text = serde_json::to_string(value).map_err(|e| Error::failed(format!("writing JSON: {e}")))?;
    out(&(text + "\n"));
    Ok(())
}

fn train_command(args: TrainArgs, global: &Global, family: Family, interrupt: &Interrupt) -> Result<()> {
    let config = TrainConfig {
        preset: args.preset,
        given: args.flags.checked()?,
        out: args.out,
        resume: args.resume,
        init_from: args.init_from,
        family,
    };
    let mut terminal = Terminal::new();
    if args.dry_run {
        return print(&plan::dry_run(&config, &mut terminal)?, global, show::dry_run);
    }
    let summary = train::run(&config, &mut terminal, interrupt);
    terminal.finish();
    let summary = summary?;
    show::train(&summary, global.json);
    print(&summary, global, |_| ())
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
            ..Sampling::default()
        },
        cache: CacheSettings { window: args.kv_window, sinks: args.kv_sinks, ..CacheSettings::default() },
        stop: args.stop,
        kind: args.r#type.as_deref().map(WeightType::named).transpose()?,
        family,
    };
    let mut terminal = if global.json { Terminal::new() } else { Terminal::streaming(&config.prompt) };
    let summary = sample::run(&config, &mut terminal, interrupt)?;
    terminal.finish();
    show::sample(&summary);
    print(&summary, global, |_| ())
}

/// TEXT as it is, @FILE from a file, - from standard input.
fn prompt(given: &str) -> Result<String> {
    match given.strip_prefix('@') {
        Some(path) => text_file(Path::new(path)),
        None if given == "-" => text_file(Path::new("-")),
        None => Ok(given.to_owned()),
    }
}

/// The text of a file, or of standard input for `-`.
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
    print(&eval::run(&config, &mut Terminal::new())?, global, show::eval)
}

fn score_command(args: ScoreArgs, global: &Global, family: Family) -> Result<()> {
    let text = match (args.text, &args.file) {
        (Some(text), _) => text,
        (None, Some(path)) => text_file(path)?,
        (None, None) => return Err(Error::usage("no text").with_hint("give --text or --file")),
    };
    let config = eval::ScoreConfig { checkpoint: args.checkpoint, text, family };
    print(&eval::score(&config, &mut Terminal::new())?, global, show::score)
}

fn presets(name: Option<&str>, global: &Global) -> Result<()> {
    if let Some(name) = name {
        return print(&Preset::load(name)?, global, show::preset);
    }
    let all: Vec<Preset> = BUILT_IN.iter().map(|(name, _)| Preset::load(name)).collect::<Result<_>>()?;
    if global.json { print(&all, global, |_| ()) } else { show::presets(&all) }
}

fn bench_command(command: BenchCommand, global: &Global, family: Family) -> Result<()> {
    let config = |args: BenchArgs| -> Result<bench::BenchConfig> {
        let given = flags::checked(&flags::pairs(&args.set)?)?;
        let BenchArgs { preset, batch, context, steps, .. } = args;
        let (checkpoint, dtype, kind) = (None, "f32".to_owned(), WeightType::F32);
        Ok(bench::BenchConfig { checkpoint, preset, given, batch, context, dtype, kind, steps, family })
    };
    let summary = match command {
        BenchCommand::Train(args) => bench::train(&bench::BenchConfig { dtype: args.dtype, ..config(args.shape)? })?,
        BenchCommand::Decode(args) => {
            let kind = WeightType::named(&args.r#type)?;
            let checkpoint = args.checkpoint;
            bench::decode(&bench::BenchConfig { kind, checkpoint, ..config(args.shape)? })?
        }
    };
    print(&summary, global, show::bench)
}
