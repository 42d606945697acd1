//! Settings of sampling: what the flags say, else what the model's generation_config.json says, else the defaults.

use std::path::Path;

use crate::engine::Sampling;
use crate::error::{Error, Result};

/// The flags that were given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Given {
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub repetition_window: Option<usize>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub seed: u64,
}

impl Given {
    /// Where this says nothing, what `other` says; the seed is this one's unless it is 0.
    pub fn or(&self, other: &Given) -> Given {
        Given {
            temperature: self.temperature.or(other.temperature),
            top_k: self.top_k.or(other.top_k),
            top_p: self.top_p.or(other.top_p),
            min_p: self.min_p.or(other.min_p),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
            repetition_window: self.repetition_window.or(other.repetition_window),
            presence_penalty: self.presence_penalty.or(other.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(other.frequency_penalty),
            seed: if self.seed == 0 { other.seed } else { self.seed },
        }
    }
}

/// The temperature where nobody names one.
pub const TEMPERATURE: f32 = 0.8;

/// What a model's generation_config.json says of sampling; nothing where there is none.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    json: serde_json::Value,
}

impl Generation {
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("generation_config.json");
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let json = serde_json::from_str(&text).map_err(|e| Error::file(&path, "JSON", e.to_string()))?;
                Ok(Self { json })
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(Error::io("read", &path, e)),
        }
    }

    /// The id that an empty prompt starts from, if it is one of so many.
    pub fn start(&self, vocab_size: usize) -> Option<u32> {
        ids(&self.json["bos_token_id"]).into_iter().find(|id| (*id as usize) < vocab_size)
    }

    /// The ids that end a text, of so many.
    pub fn ends(&self, vocab_size: usize) -> Vec<u32> {
        ids(&self.json["eos_token_id"]).into_iter().filter(|id| (*id as usize) < vocab_size).collect()
    }

    /// What holds for this run. `do_sample: false` is a temperature of 0, a value of `null` none.
    pub fn sampling(&self, given: &Given) -> Sampling {
        let number = |name: &str| self.json[name].as_f64().map(|x| x as f32);
        let default = Sampling::default();
        let greedy = self.json["do_sample"] == false;
        let temperature = if greedy { Some(0.0) } else { number("temperature") };
        Sampling {
            temperature: given.temperature.or(temperature).unwrap_or(TEMPERATURE),
            top_k: given.top_k.or(self.json["top_k"].as_u64().map(|k| k as usize)).unwrap_or(default.top_k),
            top_p: given.top_p.or(number("top_p")).unwrap_or(default.top_p),
            min_p: given.min_p.or(number("min_p")).unwrap_or(default.min_p),
            repetition_penalty: given
                .repetition_penalty
                .or(number("repetition_penalty"))
                .unwrap_or(default.repetition_penalty),
            repetition_window: given.repetition_window,
            presence_penalty: given.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: given.frequency_penalty.unwrap_or(default.frequency_penalty),
            seed: given.seed,
        }
    }
}

/// An id or a list of ids.
fn ids(json: &serde_json::Value) -> Vec<u32> {
    let one = |json: &serde_json::Value| json.as_u64().and_then(|id| u32::try_from(id).ok());
    match json.as_array() {
        Some(list) => list.iter().filter_map(one).collect(),
        None => one(json).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_the_model_and_the_model_over_the_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let none = Generation::open(dir.path()).unwrap();
        assert_eq!(
            none.sampling(&Given::default()),
            Sampling { temperature: 0.8, repetition_window: None, ..Sampling::default() }
        );
        let text =
            r#"{"bos_token_id": 900, "eos_token_id": [3, 5, 900], "temperature": 0.6, "top_k": 20, "top_p": null}"#;
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        let model = Generation::open(dir.path()).unwrap();
        let sampling = model.sampling(&Given { top_k: Some(7), seed: 3, ..Given::default() });
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed), (0.6, 7, 1.0, 3));
        assert_eq!((model.start(320), model.start(901), model.ends(320)), (None, Some(900), vec![3, 5]));
        let greedy = Generation { json: serde_json::json!({"do_sample": false, "temperature": 0.7}) };
        assert_eq!(greedy.sampling(&Given::default()).temperature, 0.0);
        std::fs::write(dir.path().join("generation_config.json"), "<html>").unwrap();
        assert!(Generation::open(dir.path()).is_err());
    }
}
