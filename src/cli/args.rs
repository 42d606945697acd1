//! The command line as clap sees it: types and help, no work.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::flags::{DataFlags, PresetFlags};

/// Train small GPTs from scratch on your own machine, and sample from them
#[derive(Debug, Parser)]
#[command(name = "gpt", version, arg_required_else_help = true, infer_subcommands = false)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Print one JSON document on the last line of stdout
    #[arg(long, global = true)]
    pub json: bool,
    /// Threads to compute with; all cores if not given
    #[arg(long, global = true, value_name = "N")]
    pub threads: Option<usize>,
    /// Where to compute: auto, cpu or metal (a Mac's GPU, which auto takes there)
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
    /// CPU kernels: avx512bf16, avx512, avx2, neon or portable; the fastest that runs here if not given
    #[arg(long, global = true, value_name = "NAME")]
    pub cpu_kernels: Option<String>,
    /// Never fetch data; use what is in the cache
    #[arg(long, global = true)]
    pub offline: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model: without arguments, preset tiny on the built-in stories
    Train(TrainArgs),
    /// Train a small model to say what a large one would, as its draft
    Distill(Box<DistillArgs>),
    /// Teach a model to write like a text: adapters beside its weights, or all of them
    Finetune(Box<FinetuneArgs>),
    /// Make one model of a base and its adapters
    Merge(MergeArgs),
    /// Continue a prompt
    Sample(Box<SampleArgs>),
    /// Loss, perplexity and bits per byte of a checkpoint on a text; with --type or --kv flags, those of sampling
    Eval(EvalArgs),
    /// The log-probability of every token of a text
    Score(ScoreArgs),
    /// Data sets
    #[command(subcommand)]
    Data(DataCommand),
    /// Tokenizers: made from a text, and what they do to one
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    /// The built-in presets as a table, or one of them as TOML
    Presets {
        /// Print this preset's file
        preset: Option<String>,
    },
    /// What a checkpoint holds
    Inspect {
        /// A model folder; the newest run if not given
        checkpoint: Option<PathBuf>,
    },
    /// What sampling from a checkpoint needs of this machine
    Doctor(DoctorArgs),
    /// How fast training and decoding are here
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Shell completions, to be sourced by the shell
    Completions { shell: clap_complete::Shell },
    /// This reference in Markdown
    #[command(hide = true)]
    Reference,
}

#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A built-in preset (`gpt presets` lists them), or a TOML file
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Folder of the run; by default a new one in checkpoints/
    #[arg(long, short, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on from the newest saved state of the run
    #[arg(long)]
    pub resume: bool,
    /// Start from the weights and the shape of this model
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "resume")]
    pub init_from: Option<PathBuf>,
    /// Say what the run would need and what would not work, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub flags: PresetFlags,
}

#[derive(Debug, Args)]
pub struct DistillArgs {
    /// The large model; the newest run if not given
    #[arg(long, value_name = "CHECKPOINT")]
    pub teacher: Option<PathBuf>,
    /// How far the two are apart: forward (KL of the student from the teacher), reverse or jensen-shannon
    #[arg(long, value_name = "NAME", default_value = "forward")]
    pub divergence: String,
    /// Divides the logits of both
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// The teacher's share of the loss; the text has the rest
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, allow_negative_numbers = true)]
    pub alpha: f32,
    /// Share of the windows that the student continues itself, to be told by the teacher
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, allow_negative_numbers = true)]
    pub on_policy: f64,
    /// Keep the K likeliest tokens of the teacher on the disk, so that other students and runs need not ask it again
    #[arg(long, value_name = "K")]
    pub teacher_top: Option<usize>,
    /// The student's shape and schedule; a built-in preset, or a TOML file [default: tiny]
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Folder of the student; TEACHER-draft if not given, where sampling finds it
    #[arg(long, short, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on from the newest saved state of the student
    #[arg(long)]
    pub resume: bool,
    #[command(flatten)]
    pub flags: PresetFlags,
}

#[derive(Debug, Args)]
pub struct FinetuneArgs {
    /// The base, a model folder; the newest run if not given
    pub checkpoint: Option<PathBuf>,
    /// Rank of the adapters; chosen from the size of the text if not given
    #[arg(long, value_name = "R", conflicts_with = "full")]
    pub rank: Option<usize>,
    /// Their scale times the rank, or times its root with --rslora [default: twice the rank]
    #[arg(long, value_name = "ALPHA", allow_negative_numbers = true, conflicts_with = "full")]
    pub alpha: Option<f32>,
    /// Projections that are adapted: some of q,k,v,o,gate,up,down,head, or all [default: all, the head only with a small vocabulary]
    #[arg(long, value_name = "LIST", conflicts_with = "full")]
    pub targets: Option<String>,
    /// Scale by alpha over the root of the rank
    #[arg(long, conflicts_with = "full")]
    pub rslora: bool,
    /// Keep the base in 8 or 4 bits while its adapters are trained [8 if no number follows]
    #[arg(long, value_name = "BITS", num_args = 0..=1, default_missing_value = "8", conflicts_with = "full")]
    pub quantized: Option<String>,
    /// Train all weights instead of adapters
    #[arg(long)]
    pub full: bool,
    /// Settings of the run that neither flags nor the text say; a built-in preset, or a TOML file [default: tiny]
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Folder of the run; by default a new one in checkpoints/, named after the base and the text
    #[arg(long, short, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on from the newest saved state of the run
    #[arg(long)]
    pub resume: bool,
    #[command(flatten)]
    pub flags: PresetFlags,
}

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// The base, or an adapter that knows its base; the newest run if not given
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Folder for the model
    #[arg(long, short, value_name = "DIR")]
    pub out: PathBuf,
    /// Store weights as f32, bf16 or f16 [default: as the base has them]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
}

/// Adapters for a checkpoint.
#[derive(Clone, Debug, Args)]
pub struct AdapterArgs {
    /// An adapter to add to the checkpoint, and a scale for it; may be given several times
    #[arg(long, value_name = "DIR[:SCALE]")]
    pub adapter: Vec<String>,
}

#[derive(Debug, Args)]
pub struct SampleArgs {
    /// A model folder; the newest run if not given
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Text to continue; @FILE reads a file, - reads standard input
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    pub prompt: String,
    /// Continue every line of a file: texts, or objects like {"prompt": "...", "seed": 1, "max_tokens": 50}; - is stdin
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompts: Option<PathBuf>,
    /// Samples of the prompt; with --prompts, rows worked on at a time [default: 1, or 8 with --prompts]
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// Type starts, see them go on, change settings with /set
    #[arg(long, short, conflicts_with_all = ["prompt", "prompts", "batch", "json"])]
    pub interactive: bool,
    /// Print each row as a JSON document on a line, in order, as soon as it is whole
    #[arg(long, conflicts_with_all = ["json", "interactive"])]
    pub jsonl: bool,
    /// Most tokens to generate
    #[arg(long, short = 'n', value_name = "N", default_value_t = 400)]
    pub max_tokens: usize,
    /// Tokens before which a text may not end
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub min_tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Add B to the logit of a token, by its id; -inf excludes it; may be given several times
    #[arg(long, value_name = "ID=B", allow_hyphen_values = true)]
    pub logit_bias: Vec<String>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Stop at this token too, by its id; may be given several times
    #[arg(long, value_name = "ID")]
    pub stop_token: Vec<u32>,
    /// Do not show what stands between two marks, nor the marks; may be given several times
    #[arg(long, value_names = ["OPEN", "CLOSE"], num_args = 2, allow_hyphen_values = true)]
    pub hide: Vec<String>,
    /// Tell the log-probability of each token, and of the N likeliest there (with --json or --jsonl)
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// A smaller model that proposes tokens, or `ngram` for what came before; CHECKPOINT-draft if there is one
    #[arg(long, value_name = "CHECKPOINT")]
    pub draft: Option<PathBuf>,
    /// Propose no tokens
    #[arg(long, conflicts_with = "draft")]
    pub no_draft: bool,
    /// Tokens proposed at a time; as many as pay off if not given
    #[arg(long, value_name = "K")]
    pub draft_tokens: Option<usize>,
    /// Decode again without batch and draft, and compare
    #[arg(long)]
    pub verify: bool,
    /// Tokens of a prompt computed at a time
    #[arg(long, value_name = "N", default_value_t = crate::recipes::sample::PREFILL_CHUNK)]
    pub prefill_chunk: usize,
    /// Write the computed prompt to a file
    #[arg(long, value_name = "FILE")]
    pub save_cache: Option<PathBuf>,
    /// Take up a computed prompt; what the prompt has in common with it is not computed again
    #[arg(long, value_name = "FILE")]
    pub load_cache: Option<PathBuf>,
}

/// How tokens are chosen. What is not given is as the model's generation_config.json says, else the default.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Divides the logits; 0 always takes the likeliest token [default: the model's, or 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep only the K likeliest tokens; 0 keeps all [default: the model's, or 0]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the fewest tokens whose probabilities reach P; 1 keeps all [default: the model's, or 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest; 0 keeps all [default: the model's, or 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens that came up before less likely; 1 does not [default: the model's, or 1]
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Last tokens that the penalties look at; all if not given
    #[arg(long, value_name = "N")]
    pub repetition_window: Option<usize>,
    /// Subtract this from the logits of tokens that were made before
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this for each time that a token was made before
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Seed of the choices; row i of several has SEED + i
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
}

/// What a model is kept in while it samples.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Keep weights as f32, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1; as the checkpoint stores them if not given
    #[arg(long, value_name = "TYPE")]
    pub r#type: Option<String>,
    /// Last tokens kept in the cache; the model's context if not given
    #[arg(long, value_name = "W")]
    pub kv_window: Option<usize>,
    /// First tokens always kept in the cache
    #[arg(long, value_name = "S", default_value_t = crate::recipes::sample::DEFAULT_SINKS)]
    pub kv_sinks: usize,
    /// Keep the cache as f32 or bf16; f32 for weights of f32, else bf16, if not given
    #[arg(long, value_name = "TYPE")]
    pub kv_type: Option<String>,
    /// Bits of a number in the cache: 8 or 4
    #[arg(long, value_name = "BITS")]
    pub kv_bits: Option<usize>,
    /// Numbers that share a scale
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub kv_group: usize,
    /// First tokens that keep their full type, rounded up to pages of 64
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub kv_quant_start: usize,
}

#[derive(Clone, Debug, Args)]
pub struct MemoryArgs {
    /// Most memory to take, like 800MB or 2GiB; `auto` fits the cache into what is available
    #[arg(long, value_name = "BYTES")]
    pub memory_budget: Option<String>,
    /// Keep the weights in main memory
    #[arg(long)]
    pub lock_memory: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A model folder; the newest run if not given
    pub checkpoint: Option<PathBuf>,
    /// Rows at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch: usize,
    /// Tokens of a row, prompt included; the model's context if not given
    #[arg(long, value_name = "T")]
    pub context: Option<usize>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Run every kernel of the Mac's GPU against the CPU instead, and print errors and speeds
    #[arg(long, conflicts_with_all = ["checkpoint", "batch", "context"])]
    pub metal: bool,
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// A model folder; the newest run if not given
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Text to evaluate on; the run's own data if not given
    #[arg(long, value_name = "DATA")]
    pub data: Option<String>,
    /// Take the whole text instead of its held-out part
    #[arg(long)]
    pub whole: bool,
    /// Take the test split of a named set instead of the one for validation
    #[arg(long, conflicts_with = "whole")]
    pub test: bool,
    /// Share that is held out; the run's own if not given
    #[arg(long, value_name = "SHARE")]
    pub validation: Option<f64>,
    /// Tokens of a window; the model's context if not given
    #[arg(long, value_name = "T")]
    pub context: Option<usize>,
    /// New tokens of each window; below the context, windows overlap and every token has more before it
    #[arg(long, value_name = "N")]
    pub stride: Option<usize>,
    /// With any of these flags, the loss is that of the engine that samples
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// A model folder; the newest run if not given
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// The text itself
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "file",
        conflicts_with = "file",
        allow_hyphen_values = true
    )]
    pub text: Option<String>,
    /// A file with the text; - is standard input
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// The named sets, and which of them are in the cache
    List,
    /// Size, splits and, where it is known, entropy; the card of a set that is not fetched
    Info {
        /// A set, a card, a file, a folder, or a mixture like wikitext-2:0.7,./my-notes:0.3
        source: String,
        #[command(flatten)]
        flags: DataFlags,
    },
    /// Fetch named sets into the cache
    Fetch {
        /// Sets, or cards
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Fetch, read and tokenize sources, so that runs find them ready
    Prepare {
        /// Sets, cards, files, folders
        #[arg(required = true)]
        sources: Vec<String>,
        #[command(flatten)]
        flags: DataFlags,
    },
    /// The documents of a source as text
    Show {
        /// A set, a card, a file or a folder
        source: String,
        /// Of the held-out part
        #[arg(long)]
        held_out: bool,
        /// The first document shown, counted from 0
        #[arg(long, value_name = "N", default_value_t = 0)]
        first: usize,
        /// Documents shown
        #[arg(long, short = 'n', value_name = "N", default_value_t = 3)]
        count: usize,
        #[command(flatten)]
        flags: DataFlags,
    },
}

#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    /// Make a tokenizer from the training part of a source
    Train {
        /// Text to make it from
        #[arg(long, value_name = "DATA")]
        data: String,
        /// Ids at most, of kind bpe
        #[arg(long, value_name = "N", default_value_t = 4096)]
        vocab: usize,
        /// bpe: pairs of bytes that come often; characters: each one of the text, and bytes for others
        #[arg(long, value_name = "KIND", default_value = "bpe")]
        kind: String,
        /// Folder for tokenizer.json and tokenizer_config.json
        #[arg(long, short, value_name = "DIR", default_value = "tokenizer")]
        out: PathBuf,
        #[command(flatten)]
        flags: DataFlags,
    },
    /// What a tokenizer has, and how it splits a text
    Show {
        /// A tokenizer.json, its folder, a model folder, or bytes; the newest run's if not given
        tokenizer: Option<PathBuf>,
        /// Split this text
        #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
        text: Option<String>,
        /// Count the bytes a token of this source
        #[arg(long, value_name = "DATA")]
        data: Option<String>,
        #[command(flatten)]
        flags: DataFlags,
    },
}

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Whole training steps on random tokens
    Train(TrainBenchArgs),
    /// Greedy decoding
    Decode(DecodeArgs),
}

#[derive(Debug, Args)]
pub struct TrainBenchArgs {
    #[command(flatten)]
    pub shape: BenchArgs,
    /// What the products multiply: f32, bf16 or auto
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub dtype: String,
    /// Train adapters of this rank beside a frozen base
    #[arg(long, value_name = "R")]
    pub rank: Option<usize>,
    /// Keep that base in 8 or 4 bits
    #[arg(long, value_name = "BITS", requires = "rank")]
    pub quantized: Option<u32>,
}

#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// A model folder; random weights of the preset if not given
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub shape: BenchArgs,
    /// What weights are kept in: f32, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub r#type: String,
    /// Count what a token costs on a GPU (dispatches, bindings, command buffers, bytes) instead; needs no GPU
    #[arg(long)]
    pub count: bool,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[arg(long, value_name = "NAME", default_value = "tiny")]
    pub preset: String,
    /// Windows of a step, or rows decoded together
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch: usize,
    /// Tokens of a window
    #[arg(long, value_name = "T", default_value_t = 256)]
    pub context: usize,
    /// Steps timed; in decoding a step is a token of every row
    #[arg(long, visible_alias = "tokens", value_name = "N", default_value_t = 20)]
    pub steps: usize,
    /// Any preset key
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}
