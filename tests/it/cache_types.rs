//! Caches of every type: the rule of sampling holds in each, and their error is bounded.

use gpt::engine::{Engine, Row, RowSettings, Sampling, WeightType};
use gpt::model::config::{GptConfig, ModelType};
use gpt::nn::cache::{CacheSettings, CacheType, Quantization};
use gpt::ops::ctx::Ctx;
use gpt::ops::simd::Family;

use crate::plain::{Plain, config};

/// A windowed and a full layer, two query heads to a key/value head, heads of one whole group and a rest.
fn shape() -> GptConfig {
    GptConfig { hidden_size: 64, head_dim: 24, ..config(ModelType::Qwen3, true, &[Some(9), None]) }
}

fn engine(family: Family) -> Engine {
    let plain = Plain::new(shape(), 4);
    Engine::new(Ctx::cpu(family), &shape(), WeightType::F32, |name, shape| Ok(plain.weight(name, shape))).unwrap()
}

fn tokens(len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| (t * t * 3 + t * 17 + 5) % 70).collect()
}

fn quantized(bits: usize, start: usize) -> CacheSettings {
    let quantization = Some(Quantization { bits, group: 16, start });
    CacheSettings { quantization, ..CacheSettings::default() }
}

/// Every type, alone and with windows, sinks and pages that stay as they are.
fn all() -> Vec<CacheSettings> {
    let bf16 = CacheSettings { kind: Some(CacheType::Bf16), ..CacheSettings::default() };
    let mut all = vec![bf16];
    for bits in [8, 4] {
        all.extend([quantized(bits, 0), quantized(bits, 70)]);
        all.push(CacheSettings { window: Some(20), sinks: 3, ..quantized(bits, 0) });
        all.push(CacheSettings { kind: Some(CacheType::Bf16), ..quantized(bits, 64) });
    }
    all
}

fn settings(cache: CacheSettings, seed: u64) -> RowSettings {
    RowSettings { cache, sampling: Sampling { seed, ..Sampling::default() }, ..RowSettings::default() }
}

fn alone(engine: &mut Engine, prompt: &[u32], settings: RowSettings, count: usize, chunk: usize) -> Vec<u32> {
    engine.set_prefill_chunk(chunk).unwrap();
    let mut row = engine.row(prompt, settings).unwrap();
    (0..count).for_each(|_| drop(engine.step(&mut [&mut row]).unwrap()));
    row.new_ids().to_vec()
}

#[test]
fn a_text_does_not_depend_on_chunks_batches_or_being_cut_back() {
    for family in Family::ALL.into_iter().filter(|f| f.available()) {
        let mut engine = engine(family);
        let lengths = [1, 70, 5, 130];
        for cache in all() {
            let mut rows: Vec<Row> = lengths
                .iter()
                .enumerate()
                .map(|(i, len)| engine.row(&tokens(*len), settings(cache, i as u64)).unwrap())
                .collect();
            for _ in 0..70 {
                engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).unwrap();
            }
            for (i, (row, len)) in rows.iter_mut().zip(lengths).enumerate() {
                let whole = row.new_ids().to_vec();
                let what = format!("{} {cache:?} row {i}", family.name());
                assert_eq!(alone(&mut engine, &tokens(len), settings(cache, i as u64), 70, 7), whole, "{what}");
                // Written again, a position has the bits that it had.
                row.truncate(row.ids().len() - 33).unwrap();
                (0..33).for_each(|_| drop(engine.step(&mut [row]).unwrap()));
                assert_eq!(row.new_ids(), whole, "{what}, cut back");
            }
        }
    }
}

fn logits(engine: &mut Engine, cache: CacheSettings) -> Vec<f64> {
    let mut all = Vec::new();
    let mut keep = |_: usize, logits: &[f32]| {
        all.extend(logits.iter().map(|x| f64::from(*x)));
        Ok(())
    };
    engine.logits(&tokens(150), cache, &mut keep).unwrap();
    all
}

#[test]
fn narrow_caches_stay_near_the_wide_one_and_the_start_stays_exact() {
    for family in Family::ALL.into_iter().filter(|f| f.available()) {
        let mut engine = engine(family);
        let wide = logits(&mut engine, CacheSettings::default());
        for cache in all().into_iter().filter(|cache| cache.window.is_none()) {
            let narrow = logits(&mut engine, cache);
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let off = norm(&mut wide.iter().zip(&narrow).map(|(w, n)| w - n)) / norm(&mut wide.iter().copied());
            let (bits, start) = cache.quantization.map_or((16, 0), |q| (q.bits, q.start.next_multiple_of(64)));
            let bound = match bits {
                16 => 0.01,
                8 => 0.02,
                _ => 0.2,
            };
            assert!(off > 0.0 && off < bound, "{} {cache:?}: relative error {off}", family.name());
            if cache.kind.is_none() {
                assert_eq!(wide[..start * 70], narrow[..start * 70], "{cache:?}: the first {start} are not quantised");
                assert_ne!(wide[..(start + 2) * 70], narrow[..(start + 2) * 70]);
            }
        }
    }
}

#[test]
fn narrow_caches_take_less_memory() {
    let mut engine = engine(Family::detect());
    let mut bytes = |cache| {
        let mut row = engine.row(&tokens(128), settings(cache, 0)).unwrap();
        engine.prefill(&mut row).unwrap();
        row.cache_bytes() as f64
    };
    let wide = bytes(CacheSettings::default());
    assert_eq!(bytes(CacheSettings { kind: Some(CacheType::Bf16), ..CacheSettings::default() }) / wide, 0.5);
    // A number's bits, and 32 for each group: 24 numbers are two groups.
    let share = |bits: f64| (bits + 2.0 * 32.0 / 24.0) / 32.0;
    for bits in [8, 4] {
        assert!((bytes(quantized(bits, 0)) / wide - share(bits as f64)).abs() < 1e-9, "{bits} bits");
    }
}

#[test]
fn settings_without_a_meaning_are_refused() {
    let engine = engine(Family::detect());
    for (bits, group) in [(3, 64), (16, 64), (8, 0), (4, 7)] {
        let quantization = Some(Quantization { bits, group, start: 0 });
        let cache = CacheSettings { quantization, ..CacheSettings::default() };
        let refused = engine.row(&[1], settings(cache, 0)).err().unwrap();
        assert!(refused.hint().is_some(), "{refused}");
    }
}
