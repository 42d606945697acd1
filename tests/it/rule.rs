//! The rule of sampling, on random cases: a text is the one that its prompt alone gets, a token at a time, whatever the
//! batch, the prefill chunk, the draft and the threads. `RULE_SEED=n` runs one case again.

use gpt::engine::batch::{Batch, Finish, Job};
use gpt::engine::draft::{Draft, Source};
use gpt::engine::{Engine, Row, RowSettings, Sampling, WeightType};
use gpt::model::config::{GptConfig, ModelType};
use gpt::nn::cache::{CacheSettings, CacheType, Quantization};
use gpt::ops::ctx::Ctx;
use gpt::ops::simd::Family;
use gpt::random::{Purpose, Stream};

use crate::plain::{Plain, config};

const CASES: u32 = 2500;

/// The choices of one case.
struct Dice {
    stream: Stream,
    drawn: u32,
}

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        self.stream.word(u64::from(self.drawn), 0) as usize % n
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    fn prompt(&mut self) -> Vec<u32> {
        let len = self.of(&[1, 2, 3, 9, 31, 63, 64, 65, 90]);
        // Few different ids, so that the past repeats itself.
        (0..len).map(|_| self.below(12) as u32).collect()
    }

    fn model(&mut self) -> GptConfig {
        let windows = self.of(&[[None, None], [Some(9), None], [Some(40), Some(3)], [Some(64), None]]);
        let kind = self.of(&[ModelType::Qwen3, ModelType::Llama]);
        let kind = if windows.iter().any(Option::is_some) { ModelType::Qwen3 } else { kind };
        let heads = self.of(&[(4, 4), (4, 2), (2, 1)]);
        GptConfig {
            hidden_size: 32,
            intermediate_size: 64,
            num_attention_heads: heads.0,
            num_key_value_heads: heads.1,
            head_dim: 16,
            max_position_embeddings: 48,
            ..config(kind, self.below(2) == 0, &windows)
        }
    }

    fn cache(&mut self) -> CacheSettings {
        let quantization = match self.below(3) {
            0 => {
                Some(Quantization { bits: self.of(&[8, 4]), group: self.of(&[8, 16, 64]), start: self.of(&[0, 3, 64]) })
            }
            _ => None,
        };
        CacheSettings {
            window: self.of(&[None, None, Some(1), Some(17), Some(64), Some(100)]),
            sinks: self.of(&[0, 4, 4, 66]),
            kind: self.of(&[None, Some(CacheType::F32), Some(CacheType::Bf16)]),
            quantization,
        }
    }

    fn settings(&mut self, cache: CacheSettings, row: usize) -> RowSettings {
        let sampling = Sampling {
            temperature: self.of(&[0.0, 0.8, 0.8]),
            top_k: self.of(&[0, 0, 5]),
            top_p: self.of(&[1.0, 0.9]),
            min_p: self.of(&[0.0, 0.05]),
            repetition_penalty: self.of(&[1.0, 1.2]),
            repetition_window: self.of(&[None, Some(20)]),
            presence_penalty: self.of(&[0.0, 0.3]),
            frequency_penalty: self.of(&[0.0, 0.2]),
            seed: row as u64,
        };
        let bias = if self.below(4) == 0 { vec![(3, 1.5), (5, f32::NEG_INFINITY)] } else { Vec::new() };
        RowSettings {
            sampling,
            cache,
            logit_bias: bias,
            stop: self.of(&[vec![], vec![7, 8]]),
            min_tokens: self.of(&[0, 6]),
            logprobs: self.of(&[None, Some(2)]),
        }
    }
}

fn engine(config: &GptConfig, kind: WeightType, seed: u64) -> Engine {
    let plain = Plain::new(config.clone(), seed);
    Engine::new(Ctx::cpu(Family::detect()), config, kind, |name, shape| Ok(plain.weight(name, shape))).unwrap()
}

/// One row, one token at a time.
fn oracle(engine: &mut Engine, job: &Job) -> Row {
    engine.set_prefill_chunk(1).unwrap();
    let mut row = engine.row(&job.prompt, job.settings.clone()).unwrap();
    while row.new_ids().len() < job.max_tokens && !row.is_finished() {
        engine.step(&mut [&mut row]).unwrap();
    }
    row
}

fn run(case: u32) {
    let dice = &mut Dice { stream: Stream::new(u64::from(case), Purpose::Test), drawn: 0 };
    let model = dice.model();
    let kind = WeightType::named(dice.of(&["f32", "f32", "bf16", "q8_0", "q4_1"])).unwrap();
    let threads = dice.of(&[1, 1, 2]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let engine_seed = 1 + dice.below(3) as u64;
    let cache = dice.cache();
    let count = 1 + dice.below(4);
    let shared = dice.prompt();
    let jobs: Vec<Job> = (0..count)
        .map(|row| {
            let mut prompt = if dice.below(2) == 0 { shared.clone() } else { Vec::new() };
            prompt.extend(dice.prompt());
            Job { prompt, settings: dice.settings(cache, row), max_tokens: dice.of(&[0, 1, 5, 12, 20]) }
        })
        .collect();
    let (source, tokens) = (dice.below(4), dice.of(&[None, Some(1), Some(2), Some(3), Some(5), Some(8)]));
    let (width, chunk) = (1 + dice.below(4), dice.of(&[1, 7, 64]));
    let what = format!(
        "RULE_SEED={case}: {model:?} {} {cache:?} {threads} threads, width {width}, chunk {chunk}, draft {source} {tokens:?}",
        kind.name()
    );
    let mut target = engine(&model, kind, engine_seed);
    let want: Vec<Row> = jobs.iter().map(|job| oracle(&mut target, job)).collect();
    let limits: Vec<usize> = jobs.iter().map(|job| job.max_tokens).collect();
    pool.install(|| {
        let mut target = engine(&model, kind, engine_seed);
        target.set_prefill_chunk(chunk).unwrap();
        let draft = match source {
            0 => None,
            1 => Some(Source::Ngram),
            // The target itself, and a stranger with another window.
            2 => Some(Source::Model(Box::new(engine(&model, kind, engine_seed)))),
            _ => {
                let other = config(ModelType::Qwen3, true, &[Some(5), None]);
                Some(Source::Model(Box::new(engine(&other, WeightType::F32, 9))))
            }
        };
        let draft = draft.map(|source| Draft::new(source, tokens).unwrap());
        let mut batch = Batch::new(&mut target, jobs, width, draft).unwrap();
        let (mut ids, mut finish) = (vec![Vec::new(); want.len()], vec![None; want.len()]);
        while let Some(step) = batch.next() {
            let step = step.unwrap();
            assert!(finish[step.job].is_none(), "{what}: row {} went on after its end", step.job);
            ids[step.job].extend(step.ids);
            finish[step.job] = step.finish;
            if let (Some(row), Some(_)) = (batch.row(step.job), step.finish) {
                assert_eq!(row.logprobs(), want[step.job].logprobs(), "{what}: row {}", step.job);
            }
        }
        for (row, want) in want.iter().enumerate() {
            assert_eq!(ids[row], want.new_ids(), "{what}: row {row}");
            let ended = if want.is_finished() { Finish::Stop } else { Finish::Length };
            assert_eq!(finish[row], Some(ended), "{what}: row {row} of at most {}", limits[row]);
        }
        let counts = batch.draft().map(|draft| draft.counts()).unwrap_or_default();
        assert!(counts.accepted <= counts.proposed, "{what}");
    });
}

#[test]
fn a_text_is_the_one_that_its_prompt_alone_gets() {
    match std::env::var("RULE_SEED") {
        Ok(seed) => run(seed.parse().expect("a number")),
        Err(_) => (0..CASES).for_each(run),
    }
}

/// With itself as the draft a model accepts everything; with a stranger, what they happen to agree on.
#[test]
fn a_draft_equal_to_the_target_is_always_right() {
    let model = GptConfig { max_position_embeddings: 48, ..config(ModelType::Qwen3, true, &[Some(9), None]) };
    for (temperature, tokens) in (1..=8).flat_map(|k| [(0.0, k), (0.9, k)]) {
        let mut target = engine(&model, WeightType::F32, 1);
        let draft = Source::Model(Box::new(engine(&model, WeightType::F32, 1)));
        let sampling = Sampling { temperature, seed: 5, ..Sampling::default() };
        let settings = RowSettings { sampling, ..RowSettings::default() };
        let job = Job { prompt: vec![3], settings, max_tokens: 200 };
        let draft = Draft::new(draft, Some(tokens)).unwrap();
        let mut batch = Batch::new(&mut target, vec![job], 1, Some(draft)).unwrap();
        let made: usize = (&mut batch).map(|step| step.unwrap().ids.len()).sum();
        let counts = batch.draft().unwrap().counts();
        assert_eq!((made, counts.accepted), (200, counts.proposed), "{tokens} at a time, temperature {temperature}");
        assert!(counts.target_steps <= 200_usize.div_ceil(tokens + 1) + 1, "{counts:?}");
    }
}

/// All rows and all proposals of a step are one pass: the weights are read once.
#[test]
fn a_step_with_proposals_reads_each_weight_once() {
    let model = config(ModelType::Qwen3, true, &[None, None]);
    let mut engine = engine(&model, WeightType::F32, 1);
    let mut rows: Vec<Row> = (0..8).map(|i| engine.row(&[i], RowSettings::default()).unwrap()).collect();
    engine.take_counts();
    let proposed = vec![vec![1, 2, 3, 4, 5]; 8];
    engine.advance(&mut rows.iter_mut().collect::<Vec<_>>(), &proposed).unwrap();
    let vectors = 8 * 6 * model.hidden_size as u64 * 4;
    assert_eq!(engine.take_counts().weight_bytes, engine.weight_bytes() as u64 + vectors);
}

/// A prompt that several rows have in common is computed once.
#[test]
fn a_shared_prompt_is_computed_once() {
    let model = config(ModelType::Qwen3, true, &[None, None]);
    let mut engine = engine(&model, WeightType::F32, 1);
    let prompt: Vec<u32> = (0..40).collect();
    let job = |seed| {
        let sampling = Sampling { seed, ..Sampling::default() };
        Job { prompt: prompt.clone(), settings: RowSettings { sampling, ..RowSettings::default() }, max_tokens: 3 }
    };
    let mut batch = Batch::new(&mut engine, (0..5).map(job).collect(), 2, None).unwrap();
    (&mut batch).for_each(|step| drop(step.unwrap()));
    // Of the other four only the last id, which the first new token follows.
    assert_eq!(batch.prefilled(), 40 + 4);
}

/// 20,000 tokens through a window of 100 positions with proposals and 8 bits: the memory is that of the window.
#[test]
fn memory_is_flat_over_a_long_text_with_every_feature() {
    let model = config(ModelType::Qwen3, true, &[None, None]);
    let mut target = engine(&model, WeightType::F32, 1);
    let cache = CacheSettings {
        window: Some(100),
        quantization: Some(Quantization { bits: 8, group: 64, start: 0 }),
        ..CacheSettings::default()
    };
    let settings = RowSettings { cache, ..RowSettings::default() };
    let draft = Draft::new(Source::Ngram, Some(3)).unwrap();
    let job = Job { prompt: vec![1], settings, max_tokens: 20_000 };
    let mut batch = Batch::new(&mut target, vec![job], 1, Some(draft)).unwrap();
    let made: usize = (&mut batch).map(|step| step.unwrap().ids.len()).sum();
    // Window, sinks, rewind, and a page begun at either end, in two layers.
    let page = 2 * model.num_key_value_heads * 64 * (model.head_dim + 4);
    assert_eq!(made, 20_000);
    assert!(batch.peak_cache_bytes() <= 2 * 6 * page, "{} bytes", batch.peak_cache_bytes());
}
