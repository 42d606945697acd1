//! Kernels for f16 and bf16 against the same kernel for f32 on numbers that both types have: results differ by the rounding of
//! what is stored.

use candle_core::DType;
use gpt::ops::gpu::kernels::{ALL, Kernel};
use gpt::ops::gpu::{Access, Element};
use half::{bf16, f16};

use super::emulator::{Emulator, Record, Recorded, available};
use super::record::records;

fn narrow(dtype: DType, x: f32) -> [u8; 2] {
    if dtype == DType::F16 { f16::from_f32(x).to_le_bytes() } else { bf16::from_f32(x).to_le_bytes() }
}

fn wide(dtype: DType, bytes: [u8; 2]) -> f32 {
    if dtype == DType::F16 { f16::from_le_bytes(bytes).to_f32() } else { bf16::from_le_bytes(bytes).to_f32() }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// A record in both types: rounded f32 buffers, and the same numbers in the narrow type, with their offsets.
fn both(kernel: &Kernel, record: &Record, dtype: DType) -> [(Vec<Vec<u8>>, Vec<usize>); 2] {
    let mut plain: Vec<Vec<u8>> = record.buffers.iter().map(|b| b.before.clone()).collect();
    let mut narrowed = plain.clone();
    let offsets: Vec<usize> = record.buffers.iter().map(|b| b.offset).collect();
    let mut halved = offsets.clone();
    let generic = kernel.slots.iter().enumerate().filter(|(_, slot)| slot.element == Element::T);
    for (i, _) in generic {
        // What nobody has written may be anything; zero is a number in every type.
        let numbers: Vec<f32> = floats(&plain[i]).into_iter().map(|x| if x.is_finite() { x } else { 0.0 }).collect();
        narrowed[i] = numbers.iter().flat_map(|x| narrow(dtype, *x)).collect();
        let back = narrowed[i].as_chunks().0.iter().map(|b| wide(dtype, *b));
        plain[i] = back.flat_map(f32::to_le_bytes).collect();
        halved[i] /= 2;
    }
    [(plain, offsets), (narrowed, halved)]
}

/// The narrow types, the ends of their kernels' names, and their steps at one.
const NARROW: [(DType, &str, f32); 2] = [(DType::F16, "_f16", 1.0 / 1024.0), (DType::BF16, "_bf16", 1.0 / 128.0)];

/// The kernel of a record and the record's function for another type, if there is one.
fn generic(record: &Record, suffix: &str) -> Option<(&'static Kernel, String)> {
    let kernel = ALL.iter().find(|k| !k.types.is_empty() && k.functions().contains(&record.function))?;
    Some((kernel, record.function.replacen("_f32", suffix, 1)))
}

/// What a record does in the narrow types, as records.
pub fn narrowed(emulator: &Emulator, record: &Record) -> Vec<Record> {
    let narrow = |(dtype, suffix, _): &(DType, &str, f32)| {
        let (kernel, function) = generic(record, suffix)?;
        let [_, (before, offsets)] = both(kernel, record, *dtype);
        let mut after = before.clone();
        emulator.run_bytes(kernel.file, &function, (&mut after, &offsets), record).unwrap();
        let writes = |i: usize| kernel.slots.get(i).is_some_and(|slot| slot.access != Access::Read);
        let buffers = before.into_iter().zip(after).zip(offsets).enumerate();
        let buffers = buffers
            .map(|(i, ((before, after), offset))| Recorded { before, after: writes(i).then_some(after), offset })
            .collect();
        Some(Record { function, buffers, ..record.clone() })
    };
    NARROW.iter().filter_map(narrow).collect()
}

#[test]
fn narrow_types_give_what_f32_gives_but_for_the_rounding() {
    if !available() {
        return;
    }
    let emulator = Emulator::default();
    let mut tried = 0;
    for record in records().iter().filter(|record| record.function.contains("_f32")) {
        for (dtype, suffix, step) in NARROW {
            let Some((kernel, function)) = generic(record, suffix) else { continue };
            let [(mut plain, wide_offsets), (mut narrowed, offsets)] = both(kernel, record, dtype);
            emulator.run_bytes(kernel.file, &record.function, (&mut plain, &wide_offsets), record).unwrap();
            emulator.run_bytes(kernel.file, &function, (&mut narrowed, &offsets), record).unwrap();
            for (i, slot) in kernel.slots.iter().enumerate().filter(|(_, slot)| slot.access != Access::Read) {
                let want = floats(&plain[i]);
                let got: Vec<f32> = match slot.element {
                    Element::T => narrowed[i].as_chunks().0.iter().map(|b| wide(dtype, *b)).collect(),
                    _ => floats(&narrowed[i]),
                };
                let size = want.iter().filter(|x| x.is_finite()).fold(0f32, |most, x| most.max(x.abs()));
                for (a, b) in want.iter().zip(&got).filter(|(a, _)| a.is_finite()) {
                    // A kernel may read again what it has stored.
                    let off = 2.0 * step * (a.abs() + 0.05 * size) + 1e-6;
                    assert!((a - b).abs() <= off, "{function}, `{}`: {b}, not {a}", slot.name);
                }
            }
            tried += 1;
        }
    }
    assert!(tried > 30, "{tried}");
}
