//! What sampling needs of the machine's memory, and settings that fit into less.
//!
//! Used by `sample` and `doctor`. The weights are loaded and a short prompt is computed, so weights and workspace are what
//! they are; the cache grows by whole pages, whose size the same prompt shows.

use crate::engine::{Engine, RowSettings};
use crate::error::{Error, Result};
use crate::nn::cache::{CacheSettings, Quantization};

/// How much memory a command may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    Bytes(u64),
    /// Most of what is available; settings of the cache adapt to it.
    Auto,
}

/// The share of the available memory that `Budget::Auto` takes.
const AUTO_SHARE: f64 = 0.8;

impl Budget {
    /// Bytes, with `available` on this machine.
    pub fn bytes(self, available: u64) -> u64 {
        match self {
            Budget::Bytes(bytes) => bytes,
            Budget::Auto => (available as f64 * AUTO_SHARE) as u64,
        }
    }

    /// `auto`, or a number with a unit: 800MB, 2GiB, 1500000000.
    pub fn parse(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Budget::Auto);
        }
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let unit = match text[end..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => Some(1.0),
            "k" | "kb" => Some(1e3),
            "m" | "mb" => Some(1e6),
            "g" | "gb" => Some(1e9),
            "kib" => Some(1024.0),
            "mib" => Some(1048576.0),
            "gib" => Some(1073741824.0),
            _ => None,
        };
        match (text[..end].parse::<f64>(), unit) {
            (Ok(number), Some(unit)) if number * unit >= 1.0 => Ok(Budget::Bytes((number * unit) as u64)),
            _ => Err(Error::usage(format!("`{text}` is no amount of memory"))
                .with_hint("use auto, or for example 800MB or 2GiB")),
        }
    }
}

/// What is needed, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Memory {
    pub weight_bytes: u64,
    pub cache_bytes: u64,
    pub workspace_bytes: u64,
}

impl Memory {
    pub fn total(&self) -> u64 {
        self.weight_bytes + self.cache_bytes + self.workspace_bytes
    }
}

/// The work that memory is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Rows at a time.
    pub rows: usize,
    /// Positions that the longest may reach.
    pub positions: usize,
}

/// Computes a short prompt in every row, and says what the whole load needs. `engines` are the model and its draft.
pub fn measure(engines: &mut [&mut Engine], cache: CacheSettings, load: Load) -> Result<Memory> {
    let mut memory = Memory::default();
    for engine in engines {
        let settings = RowSettings { cache, ..RowSettings::default() };
        let mut row = engine.row(&vec![0; load.positions.clamp(1, 64)], settings)?;
        engine.prefill(&mut row)?;
        engine.step(&mut vec![row.clone(); load.rows.min(64)].iter_mut().collect::<Vec<_>>())?;
        memory.weight_bytes += engine.weight_bytes() as u64;
        memory.workspace_bytes += engine.workspace_bytes() as u64;
        memory.cache_bytes += (load.rows * row.cache_bytes_at(load.positions)) as u64;
    }
    Ok(memory)
}

/// Settings of the cache that need less, the mildest first.
fn narrower(cache: CacheSettings, positions: usize) -> impl Iterator<Item = CacheSettings> {
    let bits = move |bits| match cache.quantization {
        Some(quantization) if quantization.bits <= bits => cache,
        _ => CacheSettings { quantization: Some(Quantization { bits, ..Quantization::default() }), ..cache },
    };
    let widest = cache.window.unwrap_or(positions).min(positions);
    let windows = std::iter::successors(Some(widest.next_power_of_two() / 2), |w| Some(w / 2)).take_while(|w| *w >= 64);
    [bits(8), bits(4)].into_iter().chain(windows.map(move |w| CacheSettings { window: Some(w), ..bits(4) }))
}

/// The mildest settings that need no more than `bytes`, with what they need.
pub fn mildest(
    engines: &mut [&mut Engine],
    cache: CacheSettings,
    load: Load,
    bytes: u64,
) -> Result<Option<(CacheSettings, Memory)>> {
    for other in narrower(cache, load.positions) {
        let memory = measure(engines, other, load)?;
        if memory.total() <= bytes {
            return Ok(Some((other, memory)));
        }
    }
    Ok(None)
}

/// What to do where no settings of the cache are enough.
pub const TOO_SMALL: &str = "use fewer rows at a time, --type q4_0, or a smaller model";

/// The settings to work with: the given ones if they fit into the budget, else, if it is `Auto`, the mildest that do.
pub fn fit(
    engines: &mut [&mut Engine],
    cache: CacheSettings,
    load: Load,
    (budget, available): (Budget, u64),
) -> Result<(CacheSettings, Memory)> {
    let bytes = budget.bytes(available);
    let memory = measure(engines, cache, load)?;
    if memory.total() <= bytes {
        return Ok((cache, memory));
    }
    match mildest(engines, cache, load, bytes)? {
        Some(fitting) if budget == Budget::Auto => Ok(fitting),
        Some((other, _)) => Err(too_much(memory, bytes).with_hint(format!("this fits: {}", flags(other)))),
        None => Err(too_much(memory, bytes).with_hint(TOO_SMALL)),
    }
}

fn too_much(memory: Memory, bytes: u64) -> Error {
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    Error::failed(format!(
        "{} are needed ({} weights, {} cache, {} workspace), and the budget is {}",
        mb(memory.total()),
        mb(memory.weight_bytes),
        mb(memory.cache_bytes),
        mb(memory.workspace_bytes),
        mb(bytes)
    ))
}

/// The flags that give these settings.
pub fn flags(cache: CacheSettings) -> String {
    let window = cache.window.map(|window| format!("--kv-window {window} --kv-sinks {}", cache.sinks));
    let bits = cache.quantization.map(|q| format!("--kv-bits {} --kv-group {}", q.bits, q.group));
    Vec::from_iter(window.into_iter().chain(bits)).join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_have_units() {
        for (text, bytes) in
            [("1500", 1500), ("2kB", 2000), ("1.5 GB", 1_500_000_000), ("2MiB", 2 << 20), ("1g", 1_000_000_000)]
        {
            assert_eq!(Budget::parse(text).unwrap(), Budget::Bytes(bytes), "{text}");
        }
        assert_eq!(Budget::parse("auto").unwrap(), Budget::Auto);
        for bad in ["", "0", "-1", "much", "2XB", "1e9"] {
            assert!(Budget::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn narrower_settings_come_mildest_first() {
        let all: Vec<String> = narrower(CacheSettings::default(), 1000).map(flags).collect();
        assert_eq!(all[0], "--kv-bits 8 --kv-group 64");
        assert_eq!(all[1], "--kv-bits 4 --kv-group 64");
        assert!(all[2].starts_with("--kv-window 512") && all.last().unwrap().starts_with("--kv-window 64 "));
    }
}
