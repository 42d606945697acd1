//! A flag for every preset key. The table is the one home of flag names and their help.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::error::{Error, Result};
use crate::preset::{BUILT_IN, Preset};

/// (flag, preset key, help).
pub const FLAGS: &[(&str, &str, &str)] = &[
    (
        "data",
        "data.source",
        "Data to train on: sets (`gpt data list`), files and folders, mixed by weights: wikitext-2:0.7,./my-notes:0.3",
    ),
    ("validation", "data.validation", "Share of the data held out for validation"),
    ("data-bytes", "data.bytes", "stories: bytes of training text"),
    ("allow-binary", "data.allow_binary", "Train on files that are not text, too"),
    ("invalid-utf8", "data.invalid_utf8", "Bytes that are not UTF-8: replace (and count), or refuse"),
    ("line-endings", "data.line_endings", "keep, or lf: CR LF becomes LF"),
    ("field", "data.field", "Field or column of jsonl, csv and parquet that is the text"),
    ("separator", "data.separator", "Text between documents of a plain file, such as <|endoftext|>"),
    ("deduplicate", "data.deduplicate", "Leave out documents that came before"),
    (
        "pack",
        "data.pack",
        "Documents in a window: across (each sees those before it), within (none sees another), off (one a window)",
    ),
    ("tokenizer", "tokenizer.file", "A tokenizer.json, or bytes"),
    ("steps", "train.steps", "Length of the run in optimizer steps"),
    ("epochs", "train.epochs", "Length of the run in passes over the data"),
    ("tokens", "train.tokens", "Length of the run in tokens (k, M and G are understood)"),
    ("max-epochs", "train.max_epochs", "Passes over the data after which the run ends at the latest; 0 for no limit"),
    ("batch", "train.batch", "Windows of a micro-batch"),
    ("accumulate", "train.accumulate", "Micro-batches whose gradients make one step"),
    ("context", "model.max_position_embeddings", "Context in tokens: the length of a window"),
    ("lr", "optimizer.learning_rate", "Highest learning rate"),
    ("warmup", "schedule.warmup", "Steps of warm-up"),
    ("schedule", "schedule.kind", "cosine, linear, wsd or constant"),
    ("final-fraction", "schedule.final_fraction", "Learning rate at the end over the highest"),
    ("decay-fraction", "schedule.decay_fraction", "wsd: share of the run over which the rate falls"),
    ("optimizer", "optimizer.kind", "adamw, or muon (matrices by Muon, the rest by AdamW)"),
    ("weight-decay", "optimizer.weight_decay", "Decoupled weight decay, on matrices only"),
    ("beta1", "optimizer.beta1", "AdamW: decay of the first moment"),
    ("beta2", "optimizer.beta2", "AdamW: decay of the second moment"),
    ("epsilon", "optimizer.epsilon", "AdamW: added to the root of the second moment"),
    ("momentum", "optimizer.momentum", "Muon's momentum"),
    ("clip", "optimizer.clip", "Highest global gradient norm; 0 does not clip"),
    ("ema", "optimizer.ema", "Decay of averaged weights, used for validation and export; 0 keeps none"),
    ("spike-threshold", "optimizer.spike_threshold", "Standard deviations at which a spiking step is skipped; 0 never"),
    ("layers", "model.num_hidden_layers", "Number of layers"),
    ("hidden-size", "model.hidden_size", "Width of the model"),
    ("heads", "model.num_attention_heads", "Number of attention heads"),
    ("kv-heads", "model.num_key_value_heads", "Number of key/value heads; must divide the heads"),
    ("head-dim", "model.head_dim", "Width of a head"),
    ("intermediate-size", "model.intermediate_size", "Width of the feed-forward layer"),
    ("window", "model.sliding_window", "Keys a token of a windowed layer sees, itself included; 0 for all"),
    ("full-attention-every", "model.full_attention_every", "With a window: every so many layers one sees everything"),
    ("model-type", "model.model_type", "qwen3, llama or mistral"),
    ("rms-norm-eps", "model.rms_norm_eps", "Added to the mean square in norms"),
    ("rope-theta", "model.rope_theta", "Base of the rotary frequencies"),
    ("tie-word-embeddings", "model.tie_word_embeddings", "Use the token table as output head"),
    ("dropout", "model.dropout", "Share of activations dropped in training"),
    (
        "dtype",
        "train.dtype",
        "What matrix products multiply: f32, bf16, or auto for the faster one here; weights and sums are f32",
    ),
    ("seed", "train.seed", "Seed of weights, data order and dropout"),
    ("save-every", "train.save_every", "Steps between saved states"),
    ("eval-every", "train.eval_every", "Steps between validations"),
    ("eval-tokens", "train.eval_tokens", "Held-out tokens of a validation during the run; 0 takes all"),
    ("keep", "train.keep", "Saved states kept"),
    ("patience", "train.patience", "Validations without a better one after which the run stops; 0 never"),
    ("recompute", "train.recompute", "Save memory: compute blocks again in the backward pass"),
];

/// The flags whose keys are true or false.
const SWITCHES: [&str; 4] = ["allow-binary", "deduplicate", "tie-word-embeddings", "recompute"];

/// What was typed for preset keys, not looked at yet.
#[derive(Clone, Debug, Default)]
pub struct PresetFlags {
    flags: Vec<Given>,
    set: Vec<String>,
}

/// One setting as it was typed.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// The flag, for messages: `--lr`, `--set`.
    flag: String,
    key: String,
    value: String,
}

impl PresetFlags {
    /// (key, value) of all settings, if every one is of a known key, of its type, and given once.
    pub fn checked(&self) -> Result<Vec<(String, String)>> {
        checked(&[self.flags.clone(), pairs(&self.set)?].concat())
    }
}

/// The settings of `--set KEY=VALUE`.
pub fn pairs(set: &[String]) -> Result<Vec<Given>> {
    let pair = |text: &String| match text.split_once('=') {
        Some((key, value)) => {
            Ok(Given { flag: "--set".into(), key: key.trim().to_owned(), value: value.trim().to_owned() })
        }
        None => Err(Error::usage(format!("--set {text}: expected KEY=VALUE"))
            .with_hint("such as --set model.rope_theta=50000; `gpt presets tiny` shows every key")),
    };
    set.iter().map(pair).collect()
}

/// Holds settings against the keys and types that presets have; what they mean together is the recipe's to say.
pub fn checked(given: &[Given]) -> Result<Vec<(String, String)>> {
    let mut any = Preset::load(BUILT_IN[0].0)?;
    let mut pairs: Vec<(String, String)> = Vec::new();
    for Given { flag, key, value } in given {
        any.set(key, value).map_err(|e| {
            let hint = e.hint().unwrap_or_default();
            Error::usage(format!("{flag}: {e}")).with_hint(hint)
        })?;
        if pairs.iter().any(|(k, _)| k == key) {
            return Err(
                Error::usage(format!("{key} is given twice")).with_hint("give it once, by its flag or by --set")
            );
        }
        pairs.push((key.clone(), value.clone()));
    }
    Ok(pairs)
}

/// Under which heading `--help` lists a key's flag.
fn heading(key: &str) -> &'static str {
    match key.split('.').next() {
        Some("model") => "Model",
        Some("data" | "tokenizer") => "Data",
        Some("optimizer") => "Optimizer",
        Some("schedule") => "Learning rate",
        _ => "Run",
    }
}

impl FromArgMatches for PresetFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let set = matches.get_many::<String>("set").into_iter().flatten().cloned().collect();
        Ok(Self { flags: FLAGS.iter().filter_map(|row| typed(matches, row)).collect(), set })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Adds flags of the table to a command.
fn augment<'a>(
    command: Command,
    flags: impl Iterator<Item = &'a (&'static str, &'static str, &'static str)>,
) -> Command {
    flags.fold(command, |command, (flag, key, help)| {
        let name = key.rsplit('.').next().unwrap_or(key);
        let arg = Arg::new(*flag).long(*flag).value_name(name).help(*help).help_heading(heading(key));
        let arg = arg.allow_negative_numbers(true);
        // A switch may stand alone: `--recompute` is `--recompute true`.
        command.arg(if SWITCHES.contains(flag) { arg.num_args(0..=1).default_missing_value("true") } else { arg })
    })
}

/// The flags that say how data are read, for commands that train nothing.
#[derive(Clone, Debug, Default)]
pub struct DataFlags(Vec<Given>);

impl DataFlags {
    /// (key, value) of all settings, if every one is of its type.
    pub fn checked(&self) -> Result<Vec<(String, String)>> {
        checked(&self.0)
    }

    fn table() -> impl Iterator<Item = &'static (&'static str, &'static str, &'static str)> {
        let is_data = |key: &str| key.starts_with("tokenizer.") || key.starts_with("data.");
        let elsewhere = ["data.source", "data.pack"];
        FLAGS.iter().filter(move |(_, key, _)| is_data(key) && !elsewhere.contains(key))
    }
}

impl FromArgMatches for DataFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(Self::table().filter_map(|row| typed(matches, row)).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for DataFlags {
    fn augment_args(command: Command) -> Command {
        augment(command, Self::table())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// What was typed for a flag, if it was.
fn typed(matches: &ArgMatches, (flag, key, _): &(&str, &str, &str)) -> Option<Given> {
    let value = matches.try_get_one::<String>(flag).ok()??.clone();
    Some(Given { flag: format!("--{flag}"), key: (*key).to_owned(), value })
}

impl Args for PresetFlags {
    fn augment_args(command: Command) -> Command {
        let command = augment(command, FLAGS.iter());
        let set = Arg::new("set").long("set").value_name("KEY=VALUE").action(ArgAction::Append);
        command.arg(set.help("Any preset key, such as model.rope_theta=50000").help_heading("Run"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_preset_key_has_exactly_one_flag() {
        let keys: BTreeSet<String> = crate::preset::keys().into_iter().collect();
        let flags: BTreeSet<String> = FLAGS.iter().map(|(_, key, _)| (*key).to_owned()).collect();
        assert_eq!(keys, flags);
        assert_eq!(flags.len(), FLAGS.len());
    }

    #[test]
    fn switches_are_the_flags_of_true_or_false() {
        let preset = Preset::load("tiny").unwrap();
        for (flag, key, _) in FLAGS {
            assert_eq!(preset.get(key).unwrap().is_bool(), SWITCHES.contains(flag), "{flag}");
        }
    }

    fn typed(line: &str) -> Result<Vec<(String, String)>> {
        let command = PresetFlags::augment_args(Command::new("x"));
        let matches = command.try_get_matches_from(line.split(' ')).unwrap();
        PresetFlags::from_arg_matches(&matches).unwrap().checked()
    }

    #[test]
    fn flags_and_set_become_keys() {
        let pairs = typed("x --lr 1e-3 --recompute --set model.rope_theta=5e4").unwrap();
        let pairs: Vec<_> = pairs.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let expected = [("optimizer.learning_rate", "1e-3"), ("train.recompute", "true"), ("model.rope_theta", "5e4")];
        assert_eq!(pairs, expected);
    }

    #[test]
    fn wrong_values_name_the_flag() {
        for (line, part) in [
            ("x --batch many", "--batch: train.batch: `many` is not a whole number"),
            ("x --batch -1", "--batch: train.batch: `-1` is not"),
            ("x --recompute maybe", "true or false"),
            ("x --set model.hiden_size=1", "--set: unknown key `model.hiden_size`"),
            ("x --set lr", "expected KEY=VALUE"),
            ("x --lr 1 --set optimizer.learning_rate=2", "given twice"),
            ("x --set train.seed=1 --set train.seed=1", "given twice"),
        ] {
            let error = typed(line).unwrap_err();
            assert!(error.to_string().contains(part), "{line}: {error}");
            assert_eq!(error.exit_code(), 2);
            assert!(error.hint().is_some_and(|h| !h.is_empty()), "{line}");
        }
    }
}
