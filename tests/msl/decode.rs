//! The engine over emulated kernels against the engine of the CPU, and what a token costs.

use std::sync::Arc;

use gpt::engine::{Engine, Row, RowSettings, Sampling, WeightType};
use gpt::model::config::{GptConfig, ModelType};
use gpt::nn::cache::{CacheSettings, CacheType, Quantization};
use gpt::ops::ctx::Ctx;
use gpt::ops::gpu::counting::Counting;
use gpt::ops::simd::Family;
use gpt::ops::storage;
use gpt::random::{Purpose, Stream};

use super::emulator;

pub fn config(model_type: ModelType, heads: (usize, usize, usize), windows: Vec<Option<usize>>) -> GptConfig {
    GptConfig {
        model_type,
        vocab_size: 50,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: windows.len(),
        num_attention_heads: heads.0,
        num_key_value_heads: heads.1,
        head_dim: heads.2,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        tie_word_embeddings: model_type == ModelType::Qwen3,
        windows,
    }
}

/// Random weights, the same for the same name.
fn weights(name: &str, shape: &[usize]) -> gpt::error::Result<Vec<f32>> {
    let salt = name.bytes().fold(7u64, |hash, b| hash.wrapping_mul(31).wrapping_add(u64::from(b))) & 0xFFFF_FFFF;
    let stream = Stream::new(5, Purpose::Test);
    let (len, norm) = (shape.iter().product::<usize>(), shape.len() == 1);
    Ok((0..len).map(|i| stream.normal(salt, i as u32) * 0.25 + if norm { 1.0 } else { 0.0 }).collect())
}

/// What weights of a type stand for; norms stay as they are.
fn rounded(kind: WeightType, weights: Vec<f32>, shape: &[usize]) -> Vec<f32> {
    match kind {
        WeightType::Bf16 if shape.len() > 1 => weights.iter().map(|w| half::bf16::from_f32(*w).to_f32()).collect(),
        WeightType::Blocks(format) if shape.len() > 1 => {
            weights.as_chunks().0.iter().flat_map(|w| format.quantize(w).weights(format)).collect()
        }
        _ => weights,
    }
}

pub fn engine(ctx: Ctx, config: &GptConfig, kind: WeightType) -> Engine {
    Engine::new(ctx, config, kind, weights).unwrap()
}

fn prompt(row: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7 + row * 13 + i * i) % 50) as u32).collect()
}

/// The texts of rows with prompts of these lengths, together.
pub fn texts(engine: &mut Engine, prompts: &[usize], settings: &RowSettings, tokens: usize) -> Vec<Vec<u32>> {
    let row = |(i, len): (usize, &usize)| {
        let mut settings = settings.clone();
        settings.sampling.seed += i as u64;
        engine.row(&prompt(i, *len), settings).unwrap()
    };
    let mut rows: Vec<Row> = prompts.iter().enumerate().map(row).collect();
    for _ in 0..tokens {
        engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).unwrap();
    }
    rows.iter().map(|row| row.new_ids().to_vec()).collect()
}

fn cases() -> Vec<(GptConfig, WeightType, RowSettings)> {
    let greedy = RowSettings { sampling: Sampling::greedy(), ..RowSettings::default() };
    let warm = |top_k| Sampling { temperature: 0.9, top_k, seed: 3, ..Sampling::default() };
    let quantized = |bits, group, start| CacheSettings {
        quantization: Some(Quantization { bits, group, start }),
        ..CacheSettings::default()
    };
    vec![
        (config(ModelType::Qwen3, (4, 2, 16), vec![None, None]), WeightType::F32, greedy.clone()),
        (
            config(ModelType::Llama, (2, 1, 6), vec![None]),
            WeightType::F32,
            RowSettings { sampling: warm(0), ..RowSettings::default() },
        ),
        (
            config(ModelType::Qwen3, (3, 3, 40), vec![Some(9), None]),
            WeightType::F32,
            RowSettings {
                sampling: warm(5),
                cache: CacheSettings { window: Some(20), sinks: 3, ..CacheSettings::default() },
                ..RowSettings::default()
            },
        ),
        (
            config(ModelType::Qwen3, (2, 2, 64), vec![None]),
            WeightType::F32,
            RowSettings { cache: quantized(8, 16, 0), ..greedy.clone() },
        ),
        (
            config(ModelType::Mistral, (2, 2, 32), vec![Some(70), None]),
            WeightType::F32,
            RowSettings { cache: CacheSettings { window: Some(80), ..quantized(4, 8, 64) }, ..greedy.clone() },
        ),
        (
            config(ModelType::Qwen3, (2, 2, 32), vec![None]),
            WeightType::F32,
            RowSettings { cache: CacheSettings { kind: Some(CacheType::Bf16), ..CacheSettings::default() }, ..greedy },
        ),
    ]
}

#[test]
fn the_texts_are_those_of_the_cpu() {
    if !emulator::available() {
        return;
    }
    for (i, (config, kind, settings)) in cases().into_iter().enumerate() {
        let mut cpu = engine(Ctx::cpu(Family::Portable), &config, kind);
        let mut gpu = engine(emulator::ctx(), &config, kind);
        // Past a page's end, past the window, and past a stretch of the attention.
        for prompts in [&[1, 60, 7][..], &[250]] {
            let tokens = if prompts.len() > 1 { 12 } else { 10 };
            let want = texts(&mut cpu, prompts, &settings, tokens);
            assert_eq!(texts(&mut gpu, prompts, &settings, tokens), want, "case {i}, prompts of {prompts:?}");
        }
    }
}

#[test]
fn a_row_is_the_same_alone_and_beside_others_and_in_other_chunks() {
    if !emulator::available() {
        return;
    }
    for (i, (config, kind, settings)) in cases().into_iter().enumerate() {
        let mut gpu = engine(emulator::ctx(), &config, kind);
        let all = texts(&mut gpu, &[5, 66, 3, 9, 1], &settings, 6);
        gpu.set_prefill_chunk(3).unwrap();
        assert_eq!(texts(&mut gpu, &[5], &settings, 6)[0], all[0], "case {i}");
    }
}

#[test]
fn logits_are_those_of_the_cpu_for_every_type_of_weights() {
    if !emulator::available() {
        return;
    }
    let config = config(ModelType::Qwen3, (2, 1, 32), vec![None, Some(5)]);
    for kind in WeightType::all() {
        let ids = prompt(0, 70);
        let logits = |mut engine: Engine| {
            let mut all = Vec::new();
            let mut each = |_, logits: &[f32]| {
                all.extend_from_slice(logits);
                Ok(())
            };
            let cache = CacheSettings { kind: Some(CacheType::F32), ..CacheSettings::default() };
            engine.logits(&ids, cache, &mut each).unwrap();
            all
        };
        // The kernels multiply f32 rows by what the weights stand for.
        let plain = |name: &str, shape: &[usize]| Ok(rounded(kind, weights(name, shape)?, shape));
        let cpu = Engine::new(Ctx::cpu(Family::Portable), &config, WeightType::F32, plain).unwrap();
        let (cpu, gpu) = (logits(cpu), logits(engine(emulator::ctx(), &config, kind)));
        for (i, (a, b)) in cpu.iter().zip(&gpu).enumerate() {
            assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{}: {i} is {b}, not {a}", kind.name());
        }
        assert!(cpu != gpu, "two ways to compute it");
    }
}

#[test]
fn a_steady_token_is_one_command_buffer_and_four_bytes() {
    for layers in [1, 3] {
        let config = config(ModelType::Qwen3, (4, 2, 16), vec![None; layers]);
        let mut engine = engine(Ctx::gpu(Arc::new(Counting), Family::detect()), &config, WeightType::Bf16);
        for rows in [1, 4] {
            let settings = RowSettings {
                sampling: Sampling { temperature: 0.8, ..Sampling::default() },
                ..RowSettings::default()
            };
            let mut rows: Vec<Row> = (0..rows).map(|i| engine.row(&prompt(i, 3), settings.clone()).unwrap()).collect();
            for _ in 0..3 {
                engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).unwrap();
            }
            engine.take_counts();
            let reads = storage::reads();
            for _ in 0..20 {
                engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).unwrap();
            }
            assert_eq!(storage::reads(), reads, "nothing waits for all of the GPU's work");
            let counts = engine.take_counts();
            assert_eq!((counts.command_buffers, counts.products), (20, 0));
            // Token vectors, head and choice beside the layers.
            assert_eq!(counts.dispatches, 20 * (7 * layers as u64 + 3));
            assert_eq!((counts.uploaded, counts.downloaded), (0, 20 * 4 * rows.len() as u64));
        }
    }
}

#[test]
fn proposals_forks_and_saved_caches_change_no_text() {
    if !emulator::available() {
        return;
    }
    for (i, (config, kind, settings)) in cases().into_iter().enumerate() {
        let mut gpu = engine(emulator::ctx(), &config, kind);
        let want = texts(&mut gpu, &[62], &settings, 9).remove(0);
        // Two right proposals and a wrong one, again and again.
        let mut row = gpu.row(&prompt(0, 62), settings.clone()).unwrap();
        while row.new_ids().len() < 9 {
            let at = row.new_ids().len();
            let mut proposed = want[at..want.len().min(at + 2)].to_vec();
            proposed.push((want[want.len().min(at + 3) - 1] + 1) % 50);
            gpu.advance(&mut [&mut row], &[proposed]).unwrap();
        }
        assert_eq!(row.new_ids()[..9], want, "case {i}: proposals");
        // A copy of a row that goes on shares its pages until it writes to them.
        let mut first = gpu.row(&prompt(0, 62), settings.clone()).unwrap();
        for _ in 0..3 {
            gpu.step(&mut [&mut first]).unwrap();
        }
        let mut second = first.fork(Sampling { seed: 99, temperature: 3.0, ..Sampling::default() }).unwrap();
        for _ in 0..6 {
            gpu.step(&mut [&mut second]).unwrap();
            gpu.step(&mut [&mut first]).unwrap();
        }
        assert_eq!(first.new_ids(), want, "case {i}: beside a fork");
        assert_ne!(second.new_ids(), want, "case {i}: the fork");
        // What is computed, as bytes, goes on in another engine.
        let mut saved = gpu.row(&prompt(0, 62), settings.clone()).unwrap();
        gpu.prefill(&mut saved).unwrap();
        let mut bytes = Vec::new();
        saved.write_cache(&mut bytes).unwrap();
        let mut other = engine(emulator::ctx(), &config, kind);
        let mut row = other.row(&prompt(0, 62), settings.clone()).unwrap();
        row.read_cache(&bytes).unwrap();
        for _ in 0..9 {
            other.step(&mut [&mut row]).unwrap();
        }
        assert_eq!(row.new_ids(), want, "case {i}: from bytes");
        // The CPU reads the same bytes.
        let mut cpu = engine(Ctx::cpu(Family::Portable), &config, kind);
        let mut row = cpu.row(&prompt(0, 62), settings.clone()).unwrap();
        row.read_cache(&bytes).unwrap();
        for _ in 0..9 {
            cpu.step(&mut [&mut row]).unwrap();
        }
        assert_eq!(row.new_ids(), want, "case {i}: from bytes on the CPU");
    }
}

#[test]
fn a_minimum_length_holds_beside_proposals_and_nan_moves_no_row() {
    if !emulator::available() {
        return;
    }
    let config = config(ModelType::Qwen3, (2, 1, 16), vec![None]);
    let mut gpu = engine(emulator::ctx(), &config, WeightType::F32);
    let plain = RowSettings { sampling: Sampling::greedy(), ..RowSettings::default() };
    let free = texts(&mut gpu, &[5], &plain, 4).remove(0);
    // The second token would end the row, but four are asked for: the stop id is passed over, proposed or not.
    let settings = RowSettings { stop: vec![free[1]], min_tokens: 4, ..plain.clone() };
    let mut cpu = engine(Ctx::cpu(Family::Portable), &config, WeightType::F32);
    let want = texts(&mut cpu, &[5], &settings, 4).remove(0);
    assert!(!want[..3].contains(&free[1]));
    let mut row = gpu.row(&prompt(0, 5), settings).unwrap();
    gpu.advance(&mut [&mut row], std::slice::from_ref(&free)).unwrap();
    while row.new_ids().len() < 4 {
        gpu.step(&mut [&mut row]).unwrap();
    }
    assert_eq!(row.new_ids()[..4], want);
    let broken = |name: &str, shape: &[usize]| match name {
        "model.norm.weight" => Ok(vec![f32::NAN; shape[0]]),
        _ => weights(name, shape),
    };
    let mut gpu = Engine::new(emulator::ctx(), &config, WeightType::F32, broken).unwrap();
    let mut row = gpu.row(&prompt(0, 5), plain).unwrap();
    for _ in 0..2 {
        let error = gpu.step(&mut [&mut row]).unwrap_err().to_string();
        assert!(error.contains("not a number"), "{error}");
        assert_eq!((row.new_ids().len(), row.pending()), (0, 1));
    }
}

#[test]
fn a_loaded_cache_gets_its_own_next_token_and_a_whole_page_can_be_saved() {
    if !emulator::available() {
        return;
    }
    let config = config(ModelType::Qwen3, (4, 2, 16), vec![None, None]);
    let greedy = || RowSettings { sampling: Sampling::greedy(), ..RowSettings::default() };
    let mut cpu = engine(Ctx::cpu(Family::Portable), &config, WeightType::F32);
    for first in 0..3 {
        let mut gpu = engine(emulator::ctx(), &config, WeightType::F32);
        let mut row = gpu.row(&prompt(first, 9), greedy()).unwrap();
        let last = gpu.step(&mut [&mut row]).unwrap()[0];
        // Its next pass is handed over, its pages are free for a row of the same length and last id.
        drop(row);
        let other = [prompt(first + 7, 9), vec![last]].concat();
        let mut saved = cpu.row(&other, greedy()).unwrap();
        cpu.prefill(&mut saved).unwrap();
        let mut bytes = Vec::new();
        saved.write_cache(&mut bytes).unwrap();
        let want = cpu.step(&mut [&mut saved]).unwrap();
        gpu.row(&other, greedy()).unwrap().read_cache(&bytes).unwrap();
        let mut row = gpu.row(&other, greedy()).unwrap();
        row.read_cache(&bytes).unwrap();
        assert_eq!(gpu.step(&mut [&mut row]).unwrap(), want, "{first}");
    }
    let mut gpu = engine(emulator::ctx(), &config, WeightType::F32);
    let mut row = gpu.row(&prompt(0, 60), greedy()).unwrap();
    for _ in 0..5 {
        gpu.step(&mut [&mut row]).unwrap();
    }
    let mut bytes = Vec::new();
    row.write_cache(&mut bytes).unwrap();
    let mut loaded = gpu.row(row.ids(), greedy()).unwrap();
    loaded.read_cache(&bytes).unwrap();
    assert_eq!(gpu.step(&mut [&mut loaded]).unwrap(), gpu.step(&mut [&mut row]).unwrap());
    // Another kind of cache, once nothing of the first is left.
    let narrow = || RowSettings {
        cache: CacheSettings { quantization: Some(Quantization::default()), ..CacheSettings::default() },
        ..greedy()
    };
    assert!(gpu.row(&[1], narrow()).is_err());
    drop((row, loaded));
    let mut row = gpu.row(&[1], narrow()).unwrap();
    gpu.step(&mut [&mut row]).unwrap();
}
