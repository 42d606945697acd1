//! A flag for every preset key. The table is the one home of flag names and their help.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// (flag, preset key, help).
pub const FLAGS: &[(&str, &str, &str)] = &[
    ("data", "data.source", "Data to train on: stories (built in), a file, or a folder of text files"),
    ("validation", "data.validation", "Share of the data held out for validation"),
    ("data-bytes", "data.bytes", "stories: bytes of training text"),
    ("allow-binary", "data.allow_binary", "Train on files that are not text, too (true or false)"),
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
    ("tie-word-embeddings", "model.tie_word_embeddings", "Use the token table as output head (true or false)"),
    ("dropout", "model.dropout", "Share of activations dropped in training"),
    ("dtype", "train.dtype", "auto or f32"),
    ("seed", "train.seed", "Seed of weights, data order and dropout"),
    ("save-every", "train.save_every", "Steps between saved states"),
    ("eval-every", "train.eval_every", "Steps between validations"),
    ("eval-tokens", "train.eval_tokens", "Held-out tokens of a validation during the run; 0 takes all"),
    ("keep", "train.keep", "Saved states kept"),
    ("patience", "train.patience", "Validations without a better one after which the run stops; 0 never"),
    ("recompute", "train.recompute", "Save memory: compute blocks again in the backward pass (true or false)"),
];

/// Preset keys set on the command line.
#[derive(Clone, Debug, Default)]
pub struct PresetFlags {
    pub given: Vec<(String, String)>,
}

impl FromArgMatches for PresetFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let flag = |(flag, key, _): &(&str, &str, &str)| {
            matches.get_one::<String>(flag).map(|value| ((*key).to_owned(), value.clone()))
        };
        let mut given: Vec<(String, String)> = FLAGS.iter().filter_map(flag).collect();
        for pair in matches.get_many::<String>("set").into_iter().flatten() {
            let (key, value) = pair.split_once('=').ok_or_else(|| {
                clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("--set {pair}: expected KEY=VALUE\n"))
            })?;
            given.push((key.trim().to_owned(), value.trim().to_owned()));
        }
        Ok(Self { given })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for PresetFlags {
    fn augment_args(command: Command) -> Command {
        let command = FLAGS.iter().fold(command, |command, (flag, key, help)| {
            let arg = Arg::new(*flag).long(*flag).value_name(key.rsplit('.').next().unwrap_or(key));
            command.arg(arg.help(*help).allow_negative_numbers(true).help_heading("Settings of the preset"))
        });
        let set = Arg::new("set").long("set").value_name("KEY=VALUE").action(ArgAction::Append);
        command.arg(set.help("Any preset key, such as model.rope_theta=50000").help_heading("Settings of the preset"))
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
}
