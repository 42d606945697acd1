//! Each command: its flags become a recipe's config, the recipe runs inside the one thread pool, the result is shown.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use serde::Serialize;

use super::args::{
    AdapterArgs, BenchArgs, BenchCommand, Cli, Command, DataCommand, DistillArgs, DoctorArgs, EngineArgs, EvalArgs,
    FinetuneArgs, Global, MergeArgs, SampleArgs, SamplingArgs, ScoreArgs, TokenizerCommand, TrainArgs,
};
use super::flags::{DataFlags, PresetFlags};
use super::terminal::{Terminal, err, out};
use super::{flags, show};
use crate::device;
use crate::error::{Error, Result};
use crate::model::gpt::Adaptation;
use crate::ops::blocks::Format;
use crate::ops::simd::Family;
use crate::preset::{BUILT_IN, Preset};
use crate::recipes::bench::LoraSettings;
use crate::recipes::report::Interrupt;
use crate::recipes::sample::memory::Budget;
use crate::recipes::sample::prompts::{self, Prompt};
use crate::recipes::sample::settings::Given;
use crate::recipes::sample::{CacheSettings, CacheType, DraftChoice, Marks, Quantization, SampleConfig, WeightType};
use crate::recipes::train::TrainConfig;
use crate::recipes::{bench, data, distill, doctor, eval, finetune, inspect, merge, plan, sample, tokenizer, train};

/// Runs one command to its end.
pub fn run(cli: Cli, interrupt: &Interrupt) -> Result<()> {
    let global = cli.global;
    let choice = device::choose(&global.device)?;
    if choice.fallback {
        err(&format!("note: this runs on the CPU: {}", choice.reason));
    }
    device::start(&choice)?;
    let family = match &global.cpu_kernels {
        Some(name) => Family::named(name)?,
        None => Family::detect(),
    };
    let threads = device::threads(global.threads)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| Error::failed(format!("starting {threads} threads: {e}")))?;
    pool.install(|| match cli.command {
        Command::Train(args) => train_command(args, &global, family, interrupt),
        Command::Distill(args) => distill_command(*args, &global, family, interrupt),
        Command::Finetune(args) => finetune_command(*args, &global, family, interrupt),
        Command::Merge(args) => merge_command(args, &global),
        Command::Sample(args) => sample_command(*args, &global, family, interrupt),
        Command::Eval(args) => eval_command(args, &global, family),
        Command::Score(args) => score_command(args, &global, family),
        Command::Data(command) => data_command(command, &global),
        Command::Tokenizer(command) => tokenizer_command(command, &global),
        Command::Presets { preset } => presets(preset.as_deref(), &global),
        Command::Inspect { checkpoint } => print(&inspect::inspect(checkpoint.as_ref())?, &global, show::inspection),
        Command::Doctor(args) => doctor_command(args, &global, family),
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
    let run = run_config((args.preset, &args.flags), (args.out, args.resume), global, family)?;
    let config = TrainConfig { init_from: args.init_from, ..run };
    let mut terminal = Terminal::new();
    if args.dry_run {
        let plan = plan::dry_run(&config, &mut terminal, interrupt);
        terminal.finish();
        return print(&plan?, global, show::dry_run);
    }
    let summary = train::run(&config, &mut terminal, interrupt);
    terminal.finish();
    let summary = summary?;
    show::train(&summary, global.json);
    print(&summary, global, |_| ())
}

/// A run as the commands that train have it.
fn run_config(
    (preset, flags): (Option<String>, &PresetFlags),
    (out, resume): (Option<PathBuf>, bool),
    global: &Global,
    family: Family,
) -> Result<TrainConfig> {
    let (given, offline) = (flags.checked()?, global.offline);
    Ok(TrainConfig { preset, given, out, resume, init_from: None, offline, family })
}

fn distill_command(args: DistillArgs, global: &Global, family: Family, interrupt: &Interrupt) -> Result<()> {
    let settings = distill::Settings {
        divergence: distill::divergence(&args.divergence)?,
        temperature: args.temperature,
        alpha: args.alpha,
    };
    let train = run_config((args.preset, &args.flags), (args.out, args.resume), global, family)?;
    let (teacher, on_policy, teacher_top) = (args.teacher, args.on_policy, args.teacher_top);
    let config = distill::DistillConfig { teacher, settings, on_policy, teacher_top, train };
    let mut terminal = Terminal::new();
    let summary = distill::run(&config, &mut terminal, interrupt);
    terminal.finish();
    let summary = summary?;
    show::distill(&summary, global.json);
    print(&summary, global, |_| ())
}

fn finetune_command(args: FinetuneArgs, global: &Global, family: Family, interrupt: &Interrupt) -> Result<()> {
    let quantized = |text: &String| {
        let bits = text.parse().map_err(|_| {
            Error::usage(format!("--quantized {text}")).with_hint("it takes 8 or 4; put the checkpoint before it")
        })?;
        Format::of_bits(bits)
    };
    let lora = finetune::LoraGiven {
        rank: args.rank,
        alpha: args.alpha,
        targets: args.targets.as_deref().map(finetune::targets).transpose()?,
        rslora: args.rslora,
        base: args.quantized.as_ref().map(quantized).transpose()?,
    };
    let train = run_config((args.preset, &args.flags), (args.out, args.resume), global, family)?;
    let config = finetune::FinetuneConfig { checkpoint: args.checkpoint, lora: (!args.full).then_some(lora), train };
    let mut terminal = Terminal::new();
    let summary = finetune::run(&config, &mut terminal, interrupt);
    terminal.finish();
    let summary = summary?;
    show::finetune(&summary, global.json);
    print(&summary, global, |_| ())
}

fn merge_command(args: MergeArgs, global: &Global) -> Result<()> {
    let config = merge::MergeConfig {
        checkpoint: args.checkpoint,
        adapters: adapters(&args.adapters)?,
        out: args.out,
        stored: args.dtype.as_deref().map(merge::StoredType::named).transpose()?,
    };
    print(&merge::run(&config, &mut Terminal::new())?, global, show::merged)
}

fn adapters(given: &AdapterArgs) -> Result<Vec<(PathBuf, f32)>> {
    given.adapter.iter().map(|text| merge::adapter(text)).collect()
}

fn sample_command(args: SampleArgs, global: &Global, family: Family, interrupt: &Interrupt) -> Result<()> {
    let (interactive, jsonl) = (args.interactive, args.jsonl);
    let config = sample_config(args, family)?;
    if interactive {
        return super::interactive::run(config, interrupt);
    }
    let mut terminal = match (global.json, jsonl) {
        (true, _) => Terminal::new(),
        (_, true) => Terminal::json_lines(),
        _ => Terminal::texts(),
    };
    let summary = sample::run(&config, &mut terminal, interrupt)?;
    show::sample(&summary);
    if jsonl { Ok(()) } else { print(&summary, global, |_| ()) }
}

/// What the flags ask for.
pub fn sample_config(args: SampleArgs, family: Family) -> Result<SampleConfig> {
    let prompts = match &args.prompts {
        Some(path) => prompts::parse(path, &text_file(path)?)?,
        None => vec![Prompt::of(&prompt(&args.prompt)?); args.batch.unwrap_or(1)],
    };
    let draft = match &args.draft {
        Some(path) if path.as_os_str() == "ngram" => DraftChoice::Ngram,
        Some(path) => DraftChoice::Model(path.clone()),
        None if args.no_draft => DraftChoice::None,
        None => DraftChoice::Beside,
    };
    let engine = &args.engine;
    Ok(SampleConfig {
        checkpoint: args.checkpoint,
        adapters: adapters(&args.adapters)?,
        width: args.batch.unwrap_or(8),
        prompts,
        max_tokens: args.max_tokens,
        min_tokens: args.min_tokens,
        sampling: given(&args.sampling),
        cache: cache(engine)?,
        marks: Marks { stop: args.stop, hide: args.hide.chunks(2).map(|p| (p[0].clone(), p[1].clone())).collect() },
        stop_tokens: args.stop_token,
        logit_bias: args.logit_bias.iter().map(|text| bias(text)).collect::<Result<_>>()?,
        logprobs: args.logprobs,
        kind: engine.r#type.as_deref().map(WeightType::named).transpose()?,
        draft,
        draft_tokens: args.draft_tokens,
        verify: args.verify,
        prefill_chunk: args.prefill_chunk,
        save_cache: args.save_cache,
        load_cache: args.load_cache,
        budget: args.memory.memory_budget.as_deref().map(Budget::parse).transpose()?,
        lock_memory: args.memory.lock_memory,
        family,
    })
}

fn given(args: &SamplingArgs) -> Given {
    Given {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        repetition_window: args.repetition_window,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        seed: args.seed,
    }
}

fn cache(args: &EngineArgs) -> Result<CacheSettings> {
    let kind = match args.kv_type.as_deref() {
        None => None,
        Some("f32") => Some(CacheType::F32),
        Some("bf16") => Some(CacheType::Bf16),
        Some(other) => {
            return Err(Error::usage(format!("unknown cache type `{other}`"))
                .with_hint("use f32 or bf16; for fewer bits --kv-bits 8 or 4"));
        }
    };
    let quantization = args.kv_bits.map(|bits| Quantization { bits, group: args.kv_group, start: args.kv_quant_start });
    let cache = CacheSettings { window: args.kv_window, sinks: args.kv_sinks, kind, quantization };
    cache.validate()?;
    Ok(cache)
}

/// ID=B.
fn bias(text: &str) -> Result<(u32, f32)> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| Error::usage(format!("`{text}` is no logit bias")).with_hint("use ID=B, for example 10=-inf"))
}

fn doctor_command(args: DoctorArgs, global: &Global, family: Family) -> Result<()> {
    if args.metal {
        let found = doctor::metal::run(family)?;
        print(&found, global, show::kernels)?;
        return match found.passed {
            true => Ok(()),
            false => {
                Err(Error::failed("some kernels differ from the CPU")
                    .with_hint("docs/guides/mac.md says how to report it"))
            }
        };
    }
    let config = doctor::DoctorConfig {
        checkpoint: args.checkpoint,
        device: device::choose(&global.device)?,
        rows: args.batch,
        positions: args.context,
        cache: cache(&args.engine)?,
        kind: args.engine.r#type.as_deref().map(WeightType::named).transpose()?,
        budget: args.memory.memory_budget.as_deref().map(Budget::parse).transpose()?,
        lock_memory: args.memory.lock_memory,
        family,
    };
    print(&doctor::run(&config, &mut Terminal::new())?, global, show::doctor)
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

/// A source as the commands that read one have it.
fn data_config(source: String, flags: &DataFlags, global: &Global) -> Result<data::DataConfig> {
    Ok(data::DataConfig { source, given: flags.checked()?, offline: global.offline })
}

fn data_command(command: DataCommand, global: &Global) -> Result<()> {
    let offline = global.offline;
    let config = |source, flags: &DataFlags| data_config(source, flags, global);
    let mut terminal = Terminal::new();
    match command {
        DataCommand::List => print(&data::list(), global, show::data_list),
        DataCommand::Info { source, flags } => {
            print(&data::info(&config(source, &flags)?, &mut terminal)?, global, show::data)
        }
        DataCommand::Fetch { names } => {
            let fetched: Vec<_> =
                names.iter().map(|name| data::fetch(name, offline, &mut terminal)).collect::<Result<_>>()?;
            print(&fetched, global, |all| all.iter().for_each(show::fetched))
        }
        DataCommand::Prepare { sources, flags } => {
            let configs: Vec<_> = sources.into_iter().map(|source| config(source, &flags)).collect::<Result<_>>()?;
            let prepared: Vec<_> =
                configs.iter().map(|config| data::prepare(config, &mut terminal)).collect::<Result<_>>()?;
            print(&prepared, global, |all| all.iter().for_each(show::data))
        }
        DataCommand::Show { source, held_out, first, count, flags } => {
            let config = data::ShowConfig { data: config(source, &flags)?, held_out, first, count };
            print(&data::show(&config, &mut terminal)?, global, show::documents)
        }
    }
}

fn tokenizer_command(command: TokenizerCommand, global: &Global) -> Result<()> {
    let config = |source, flags: &DataFlags| data_config(source, flags, global);
    let mut terminal = Terminal::new();
    match command {
        TokenizerCommand::Train { data, vocab, kind, out, flags } => {
            let kind = tokenizer::Kind::named(&kind)?;
            let config = tokenizer::TrainConfig { data: config(data, &flags)?, kind, vocab, out };
            print(&tokenizer::train(&config, &mut terminal)?, global, show::tokenizer_trained)
        }
        TokenizerCommand::Show { tokenizer: path, text, data, flags } => {
            let data = data.map(|source| config(source, &flags)).transpose()?;
            let config = tokenizer::ShowConfig { tokenizer: path, text, data };
            print(&tokenizer::show(&config, &mut terminal)?, global, show::tokenizer)
        }
    }
}

fn eval_command(args: EvalArgs, global: &Global, family: Family) -> Result<()> {
    let EvalArgs { checkpoint, adapters: given, data, whole, test, validation, context, stride, engine } = args;
    let asked = cache(&engine)?;
    let kind = engine.r#type.as_deref().map(WeightType::named).transpose()?;
    let engine = (kind.is_some() || asked != CacheSettings::default()).then_some((kind, asked));
    let offline = global.offline;
    let config = eval::EvalConfig {
        checkpoint,
        adapters: adapters(&given)?,
        data,
        whole,
        test,
        validation,
        context,
        stride,
        engine,
        offline,
        family,
    };
    print(&eval::run(&config, &mut Terminal::new())?, global, show::eval)
}

fn score_command(args: ScoreArgs, global: &Global, family: Family) -> Result<()> {
    let text = match (args.text, &args.file) {
        (Some(text), _) => text,
        (None, Some(path)) => text_file(path)?,
        (None, None) => return Err(Error::usage("no text").with_hint("give --text or --file")),
    };
    let adapters = adapters(&args.adapters)?;
    let config = eval::ScoreConfig { checkpoint: args.checkpoint, adapters, text, family };
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
        let adaptation = None;
        Ok(bench::BenchConfig { checkpoint, preset, given, batch, context, dtype, adaptation, kind, steps, family })
    };
    let summary = match command {
        BenchCommand::Train(args) => {
            let base = args.quantized.map(Format::of_bits).transpose()?;
            let adaptation = args.rank.map(|rank| Adaptation { base, lora: LoraSettings::of_rank(rank), seed: 0 });
            bench::train(&bench::BenchConfig { dtype: args.dtype, adaptation, ..config(args.shape)? })?
        }
        BenchCommand::Decode(args) => {
            let kind = WeightType::named(&args.r#type)?;
            let config = bench::BenchConfig { kind, checkpoint: args.checkpoint, ..config(args.shape)? };
            if args.count {
                return print(&bench::count(&config)?, global, show::counts);
            }
            bench::decode(&config)?
        }
    };
    print(&summary, global, show::bench)
}
