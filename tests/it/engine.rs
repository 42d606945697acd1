//! The engine against its oracle, and against itself: the same bits however a text is cut, batched, shared or rewound.

use gpt::engine::{Engine, PREFILL_CHUNK, Row, RowSettings, Sampling, WeightType};
use gpt::model::config::{GptConfig, ModelType};
use gpt::model::gpt::{Batch, Gpt};
use gpt::nn::cache::CacheSettings;
use gpt::ops::ctx::Ctx;
use gpt::ops::simd::Family;
use gpt::ops::storage;

use crate::plain::{Plain, config};

const SEED: u64 = 4;

fn engine_on(family: Family, config: &GptConfig) -> Engine {
    let plain = Plain::new(config.clone(), SEED);
    Engine::new(Ctx::cpu(family), config, WeightType::F32, |name, shape| Ok(plain.weight(name, shape))).unwrap()
}

fn engine(config: &GptConfig) -> Engine {
    engine_on(Family::detect(), config)
}

fn families() -> impl Iterator<Item = Family> {
    Family::ALL.into_iter().filter(|f| f.available())
}

/// Everything a decoder can have: a windowed and a full layer, query/key norm, tied.
fn mixed() -> GptConfig {
    config(ModelType::Qwen3, true, &[Some(9), None])
}

fn cache(window: usize, sinks: usize) -> CacheSettings {
    CacheSettings { window: Some(window), sinks, ..CacheSettings::default() }
}

fn tokens(len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| (t * t * 3 + t * 17 + 5) % 70).collect()
}

fn settings(seed: u64) -> RowSettings {
    let sampling = Sampling { seed, temperature: 0.9, repetition_penalty: 1.1, top_p: 0.95, ..Sampling::default() };
    RowSettings { sampling, ..RowSettings::default() }
}

/// Logits of all positions as bits, cut into chunks.
fn bits(engine: &mut Engine, ids: &[u32], cache: CacheSettings, chunk: usize) -> Vec<u32> {
    engine.set_prefill_chunk(chunk).unwrap();
    let mut all = Vec::new();
    engine
        .logits(ids, cache, |first, logits| {
            assert_eq!(first * 70, all.len());
            all.extend(logits.iter().map(|x| x.to_bits()));
            Ok(())
        })
        .unwrap();
    assert_eq!(all.len(), ids.len() * 70);
    all
}

fn assert_equals_oracle(family: Family, config: &GptConfig, len: usize, cache: CacheSettings) {
    let ids = tokens(len);
    let want = Plain::new(config.clone(), SEED).logits(&ids, cache);
    let got = bits(&mut engine_on(family, config), &ids, cache, PREFILL_CHUNK);
    for (t, (got, want)) in got.chunks(70).zip(&want).enumerate() {
        for (got, want) in got.iter().map(|bits| f64::from(f32::from_bits(*bits))).zip(want) {
            // Logits are sums of some hundred terms of size one, through two or three layers, in f32.
            let close = (got - want).abs() <= 1e-4 * (1.0 + want.abs());
            assert!(close, "{} {config:?} {cache:?}: position {t} is {got}, expected {want}", family.name());
        }
    }
}

#[test]
fn logits_equal_the_f64_oracle_for_every_kind_of_model() {
    for family in families() {
        for (model_type, tied, windows) in [
            (ModelType::Qwen3, true, &[None, None][..]),
            (ModelType::Llama, false, &[None, None]),
            (ModelType::Mistral, false, &[Some(7), Some(7)]),
            (ModelType::Qwen3, false, &[Some(5), None, Some(66)]),
        ] {
            assert_equals_oracle(family, &config(model_type, tied, windows), 45, CacheSettings::default());
        }
        let wide = GptConfig { num_key_value_heads: 1, head_dim: 98, ..mixed() };
        assert_equals_oracle(family, &wide, 20, CacheSettings::default());
    }
}

/// -ln of the probability that logits (V) give to a token.
fn nll(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    sum.ln() - f64::from(logits[target as usize] - max)
}

#[test]
fn decoding_computes_the_forward_that_was_trained() {
    for family in families() {
        for (tied, windows) in [(true, [Some(9), None]), (false, [None, Some(1)])] {
            let config = config(ModelType::Qwen3, tied, &windows);
            let plain = Plain::new(config.clone(), SEED);
            let model = Gpt::build(&config, &mut |name, shape| Ok(plain.weight(name, shape))).unwrap();
            let (inputs, targets) = (tokens(48), tokens(49)[1..].to_vec());
            let batch = Batch::new(inputs.clone(), targets.clone(), 48);
            let trained = model.nll(&mut Ctx::cpu(family), &batch).unwrap();
            let trained = storage::read::<f32>("test", &trained).unwrap();
            engine_on(family, &config)
                .logits(&inputs, CacheSettings::default(), |first, logits| {
                    for (t, logits) in (first..).zip(logits.chunks(70)) {
                        let (got, want) = (nll(logits, targets[t]), f64::from(trained[t]));
                        assert!((got - want).abs() < 1e-4 * (1.0 + want), "{}: {t}: {got} {want}", family.name());
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn logits_equal_the_f64_oracle_far_past_window_and_context() {
    for (window, sinks) in [(1, 0), (1, 1), (16, 0), (16, 4), (64, 4), (65, 70), (130, 1)] {
        assert_equals_oracle(Family::detect(), &mixed(), 210, cache(window, sinks));
    }
    assert_equals_oracle(Family::detect(), &mixed(), 210, CacheSettings::default());
}

#[test]
fn sinks_and_windows_matter_once_the_text_outgrows_the_window() {
    let (mut engine, ids) = (engine(&mixed()), tokens(60));
    let (with, without) = (bits(&mut engine, &ids, cache(16, 4), 64), bits(&mut engine, &ids, cache(16, 0), 64));
    assert_eq!(with[..16 * 70], without[..16 * 70]);
    assert_ne!(with[16 * 70..17 * 70], without[16 * 70..17 * 70]);
    let narrow = bits(&mut engine, &ids, cache(15, 4), 64);
    assert_ne!(with, narrow);
}

#[test]
fn every_prefill_chunk_gives_the_bits_of_token_by_token() {
    for family in families() {
        let mut engine = engine_on(family, &mixed());
        for (window, sinks, len) in [(16, 4, 15), (16, 4, 16), (16, 4, 17), (16, 0, 33), (64, 4, 129), (70, 66, 300)] {
            let ids = tokens(len);
            let one = bits(&mut engine, &ids, cache(window, sinks), 1);
            for chunk in [2, 7, 64] {
                let other = bits(&mut engine, &ids, cache(window, sinks), chunk);
                assert!(one == other, "{}: window {window}, sinks {sinks}, length {len}, {chunk}", family.name());
            }
        }
    }
}

/// A text of `count` new ids, alone, prompt cut into `chunk`s.
fn alone(engine: &mut Engine, prompt: &[u32], settings: RowSettings, count: usize, chunk: usize) -> Vec<u32> {
    engine.set_prefill_chunk(chunk).unwrap();
    let mut row = engine.row(prompt, settings).unwrap();
    for _ in 0..count {
        engine.step(&mut [&mut row]).unwrap();
    }
    row.new_ids().to_vec()
}

#[test]
fn rows_of_a_batch_are_what_each_is_alone() {
    let config = mixed();
    let mut engine = engine(&config);
    let lengths = [1, 70, 5, 200, 64, 65, 2, 130, 31];
    let settings = |i: usize| RowSettings {
        cache: if i.is_multiple_of(2) { cache(16, 4) } else { CacheSettings::default() },
        ..settings(i as u64)
    };
    let mut rows: Vec<Row> =
        lengths.iter().enumerate().map(|(i, len)| engine.row(&tokens(*len), settings(i)).unwrap()).collect();
    for step in 0..60 {
        // Rows join one after the other.
        let mut refs: Vec<&mut Row> = rows.iter_mut().take(1 + step).collect();
        let ids = engine.step(&mut refs).unwrap();
        assert_eq!(ids.len(), refs.len());
        assert!(refs.iter().zip(&ids).all(|(row, id)| row.new_ids().last() == Some(id)));
    }
    for (i, (row, len)) in rows.iter().zip(lengths).enumerate() {
        let count = row.new_ids().len();
        assert_eq!(row.new_ids(), alone(&mut engine, &tokens(len), settings(i), count, 1), "row {i}");
    }
    assert_ne!(rows[2].new_ids()[..20], rows[6].new_ids()[..20]);
}

#[test]
fn more_rows_than_a_chunk_fit_into_a_step() {
    let mut engine = engine(&mixed());
    let mut rows: Vec<Row> = (0..70).map(|i| engine.row(&tokens(1 + i % 3), settings(i as u64)).unwrap()).collect();
    for _ in 0..3 {
        engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).unwrap();
    }
    for i in [0, 1, 63, 64, 69] {
        assert_eq!(rows[i].new_ids(), alone(&mut engine, &tokens(1 + i % 3), settings(i as u64), 3, 64), "row {i}");
    }
    assert!(engine.step(&mut []).unwrap().is_empty());
}

#[test]
fn a_forked_row_shares_its_prefix_and_changes_nothing_in_it() {
    let mut engine = engine(&mixed());
    engine.set_prefill_chunk(PREFILL_CHUNK).unwrap();
    let mut first = engine.row(&tokens(100), settings(0)).unwrap();
    engine.prefill(&mut first).unwrap();
    assert_eq!(first.pending(), 1);
    let mut second = first.fork(settings(1).sampling).unwrap();
    for _ in 0..40 {
        engine.step(&mut [&mut second]).unwrap();
        engine.step(&mut [&mut first]).unwrap();
    }
    assert_eq!(first.new_ids(), alone(&mut engine, &tokens(100), settings(0), 40, 64));
    assert_eq!(second.new_ids(), alone(&mut engine, &tokens(100), settings(1), 40, 64));
    assert_ne!(first.new_ids(), second.new_ids());
}

#[test]
fn cutting_back_and_going_on_gives_the_same_text() {
    let mut engine = engine(&mixed());
    for (window, sinks) in [(16, 4), (100, 0), (1, 0)] {
        let settings = RowSettings { cache: cache(window, sinks), ..settings(3) };
        let mut row = engine.row(&tokens(40), settings).unwrap();
        for _ in 0..150 {
            engine.step(&mut [&mut row]).unwrap();
        }
        let whole = row.ids().to_vec();
        for back in [1, 2, 3, 17, 63] {
            let keep = row.ids().len() - back;
            row.truncate(keep).unwrap();
            assert_eq!(row.ids(), &whole[..keep]);
            while row.ids().len() < whole.len() {
                engine.step(&mut [&mut row]).unwrap();
            }
            assert_eq!(row.ids(), whole, "window {window}, {back} back");
        }
        assert!(row.truncate(0).is_err() && row.truncate(whole.len() + 1).is_err());
        // The windowed layer has long dropped what position 50 would see.
        assert!(row.truncate(50).is_err());
        assert_eq!(row.ids(), whole, "a refused cut changes nothing");
    }
}

#[test]
fn the_number_of_threads_changes_no_token() {
    let wide = GptConfig { hidden_size: 320, intermediate_size: 640, ..mixed() };
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut engine = engine(&wide);
            let logits = bits(&mut engine, &tokens(150), CacheSettings::default(), 64);
            (logits, alone(&mut engine, &tokens(90), settings(0), 30, 64))
        })
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

#[test]
fn one_step_reads_each_weight_once_for_all_rows() {
    let mut engine = engine(&mixed());
    for count in [1, 8, 70] {
        let mut rows: Vec<Row> = (0..count).map(|i| engine.row(&tokens(1), settings(i)).unwrap()).collect();
        let mut refs: Vec<&mut Row> = rows.iter_mut().collect();
        engine.take_counts();
        engine.step(&mut refs).unwrap();
        let counts = engine.take_counts();
        let vectors = count * 40 * 4;
        assert_eq!(counts.weight_bytes, engine.weight_bytes() as u64 + vectors, "{count} rows");
        assert_eq!(counts.launches, 2 * 5 + 2);
    }
}

#[test]
fn memory_stays_bounded_over_a_long_text() {
    let mut engine = engine(&mixed());
    let mut row = engine.row(&tokens(10), RowSettings { cache: cache(64, 4), ..settings(0) }).unwrap();
    let mut most = 0;
    for step in 0..3000 {
        engine.step(&mut [&mut row]).unwrap();
        if step == 300 {
            most = row.cache_bytes();
        }
        assert!(step < 300 || row.cache_bytes() <= most + 2 * 2 * 2 * 64 * 20 * 4, "step {step}");
    }
}

#[test]
fn stop_ids_finish_a_row() {
    let mut engine = engine(&mixed());
    let text = alone(&mut engine, &tokens(5), settings(0), 10, 64);
    let settings = RowSettings { stop: vec![text[4]], ..settings(0) };
    let mut row = engine.row(&tokens(5), settings).unwrap();
    while !row.is_finished() {
        engine.step(&mut [&mut row]).unwrap();
    }
    let first = text.iter().position(|id| *id == text[4]).unwrap();
    assert_eq!(row.new_ids(), &text[..=first]);
    assert!(engine.step(&mut [&mut row]).is_err(), "a finished row does not go on");
}

#[test]
fn bad_input_is_refused_and_named() {
    let mut engine = engine(&mixed());
    let refused = |prompt: &[u32], settings: RowSettings| {
        let error = engine.row(prompt, settings).err().unwrap();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    };
    assert!(refused(&[], settings(0)).contains("empty"));
    assert!(refused(&[1, 70], settings(0)).contains("70"));
    assert!(refused(&[1], RowSettings { cache: cache(0, 4), ..settings(0) }).contains("window"));
    let hot = Sampling { temperature: f32::NAN, ..Sampling::default() };
    assert!(refused(&[1], RowSettings { sampling: hot, ..settings(0) }).contains("temperature"));
    assert!(engine.logits(&[3, 99], CacheSettings::default(), |_, _| Ok(())).is_err());
    engine.logits(&[], CacheSettings::default(), |_, _| panic!("no positions")).unwrap();
    assert!(engine.set_prefill_chunk(0).is_err() && engine.set_prefill_chunk(65).is_err());
}

#[test]
fn damaged_weights_give_an_error_and_leave_the_row_as_it_was() {
    let plain = Plain::new(mixed(), SEED);
    let weights = |name: &str, shape: &[usize]| {
        let mut data = plain.weight(name, shape);
        if name == "model.norm.weight" {
            data[0] = f32::NAN;
        }
        Ok(data)
    };
    let mut engine = Engine::new(Ctx::cpu(Family::detect()), &mixed(), WeightType::F32, weights).unwrap();
    let mut row = engine.row(&tokens(3), settings(0)).unwrap();
    for _ in 0..2 {
        assert!(engine.step(&mut [&mut row]).unwrap_err().to_string().contains("not a number"));
        assert_eq!((row.ids().len(), row.pending()), (3, 1));
    }
    let short = Engine::new(Ctx::cpu(Family::detect()), &mixed(), WeightType::F32, |_, _| Ok(vec![0.0; 3]));
    assert!(short.err().unwrap().to_string().contains("model.embed_tokens.weight"));
}

/// `mixed` with rows of whole blocks, so that every type of weight fits.
fn blocks() -> GptConfig {
    GptConfig { hidden_size: 64, intermediate_size: 96, head_dim: 24, ..mixed() }
}

fn engine_of(kind: WeightType, family: Family) -> Engine {
    let plain = Plain::new(blocks(), SEED);
    Engine::new(Ctx::cpu(family), &blocks(), kind, |name, shape| Ok(plain.weight(name, shape))).unwrap()
}

#[test]
fn every_type_of_weight_gives_a_row_the_same_text_alone_and_beside_others() {
    for family in families() {
        for kind in WeightType::all() {
            let mut engine = engine_of(kind, family);
            let count = 32;
            let mut rows: Vec<Row> =
                (0..count).map(|i| engine.row(&tokens(1 + 3 * (i % 5)), settings(i as u64)).unwrap()).collect();
            for step in 0..12 {
                // From one row to all of them, so that every height of tile is met.
                let mut refs: Vec<&mut Row> = rows.iter_mut().take(1 + 3 * step).collect();
                engine.step(&mut refs).unwrap();
            }
            for i in [0, 1, 4, 16, 31] {
                let new = rows[i].new_ids().to_vec();
                let what = format!("{} {} row {i}", family.name(), kind.name());
                assert_eq!(
                    alone(&mut engine, &tokens(1 + 3 * (i % 5)), settings(i as u64), new.len(), 7),
                    new,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn narrower_weights_stay_near_the_wide_ones_and_are_read_once() {
    let ids = tokens(40);
    let logits = |kind| -> Vec<f32> {
        let all = bits(&mut engine_of(kind, Family::detect()), &ids, CacheSettings::default(), 16);
        all.into_iter().map(f32::from_bits).collect()
    };
    let wide = logits(WeightType::F32);
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    for kind in WeightType::all() {
        // Relative error of the logits: random weights hide nothing, so it is that of the types, a few times over.
        let bound = match kind.name() {
            "f32" => 1e-9,
            "bf16" => 0.03,
            "q8_0" => 0.05,
            "q5_0" | "q5_1" => 0.25,
            _ => 0.5,
        };
        let narrow = logits(kind);
        let off = norm(&mut wide.iter().zip(&narrow).map(|(w, n)| w - n)) / norm(&mut wide.iter().copied());
        assert!(off < bound, "{}: relative error {off}", kind.name());
        let mut engine = engine_of(kind, Family::detect());
        for count in [1, 8] {
            let mut rows: Vec<Row> = (0..count).map(|i| engine.row(&tokens(1), settings(i)).unwrap()).collect();
            engine.take_counts();
            engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).unwrap();
            let vectors = count * 64 * 4;
            assert_eq!(engine.take_counts().weight_bytes, engine.weight_bytes() as u64 + vectors, "{}", kind.name());
        }
    }
}

#[test]
fn rows_that_are_no_whole_blocks_are_refused_with_a_way_out() {
    let plain = Plain::new(mixed(), SEED);
    let kind = WeightType::named("q4_0").unwrap();
    let refused = Engine::new(Ctx::cpu(Family::detect()), &mixed(), kind, |name, shape| Ok(plain.weight(name, shape)));
    let error = refused.err().unwrap();
    assert!(error.to_string().contains("32") && error.hint().unwrap().contains("bf16"), "{error}");
    assert!(WeightType::named("q8").unwrap_err().hint().unwrap().contains("q8_0"));
}
