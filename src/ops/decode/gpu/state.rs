//! What a pass needs on the device beside weights and pages, and what the host knows of it: ids, positions, settings of the
//! rows, tables of pages, angles. Each is sent only when it differs from what the device has.

use candle_core::Tensor;

use super::super::page::{PAGE, Quantization};
use super::super::{Lane, Sizes, Tables, frequencies, rotations};
use super::{Choosing, Step};
use crate::error::{Error, Result};
use crate::ops::ctx::{Ctx, Value};
use crate::ops::storage;

/// Windows and sinks beyond this see everything.
pub(super) const MOST: usize = 1 << 30;

/// Numbers on the device, and a copy of them where the host knows them.
#[derive(Default)]
struct Mirrored {
    /// `None` where the device has made them by itself.
    host: Option<Vec<u32>>,
    device: Option<Value>,
}

impl Mirrored {
    /// Makes the device's the given ones.
    fn set(&mut self, ctx: &mut Ctx, numbers: &[u32]) {
        if self.device.is_none() || self.host.as_deref() != Some(numbers) {
            self.device = Some(ctx.upload(numbers, numbers.len()));
            let host = self.host.get_or_insert_default();
            host.clear();
            host.extend_from_slice(numbers);
        }
    }

    fn get(&self) -> Result<&Tensor> {
        self.device.as_deref().ok_or_else(|| Error::op("decode", "a pass that was begun", "none"))
    }
}

pub(super) struct State {
    sizes: Sizes,
    frequencies: Vec<f64>,
    /// Cosines and sines of the positions 0.., (positions, D).
    angles: Option<Tensor>,
    positions: usize,
    /// (lanes, 2): row and position.
    lanes: Mirrored,
    ids: Mirrored,
    /// (rows, 4): window, sinks, plain blocks.
    rows: Mirrored,
    /// (layers, rows, length): numbers of pages.
    tables: Mirrored,
    rows_of_tables: usize,
    length: usize,
    /// The lanes of the outputs.
    outputs: Mirrored,
    /// (outputs, 5): lane, seed, top-k, temperature.
    choosing: Mirrored,
}

impl State {
    pub(super) fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            frequencies: frequencies(sizes),
            angles: None,
            positions: 0,
            lanes: Mirrored::default(),
            ids: Mirrored::default(),
            rows: Mirrored::default(),
            tables: Mirrored::default(),
            rows_of_tables: 0,
            length: 0,
            outputs: Mirrored::default(),
            choosing: Mirrored::default(),
        }
    }

    /// Brings the device to what a pass needs; `layers` are their number, the first one without a window of its own, and how
    /// the cache is quantised.
    pub(super) fn begin(
        &mut self,
        ctx: &mut Ctx,
        tables: &impl Tables,
        (layers, full, quantization): (usize, Option<usize>, Option<Quantization>),
        step: &Step,
    ) -> Result<()> {
        let last = step.lanes.iter().map(|lane| lane.position).max().unwrap_or(0);
        self.extend_angles(last + 1);
        let lanes: Vec<u32> = step.lanes.iter().flat_map(|l| [l.row as u32, l.position as u32]).collect();
        self.lanes.set(ctx, &lanes);
        match step.ids {
            Some(ids) => self.ids.set(ctx, ids),
            None => drop(self.ids.get()?),
        }
        self.set_rows(ctx, tables, (layers, full, quantization), step.lanes);
        let outputs: Vec<u32> = step.outputs.iter().map(|lane| *lane as u32).collect();
        if !outputs.is_empty() {
            self.outputs.set(ctx, &outputs);
        }
        if let Some(choosing) = step.choosing {
            let words = |(lane, c): (&usize, &Choosing)| {
                let top_k = u32::try_from(c.top_k).unwrap_or(0);
                [*lane as u32, c.seed as u32, (c.seed >> 32) as u32, top_k, c.temperature.to_bits()]
            };
            let words: Vec<u32> = step.outputs.iter().zip(choosing).flat_map(words).collect();
            self.choosing.set(ctx, &words);
        }
        Ok(())
    }

    fn set_rows(
        &mut self,
        ctx: &mut Ctx,
        tables: &impl Tables,
        (layers, full, quantization): (usize, Option<usize>, Option<Quantization>),
        lanes: &[Lane],
    ) {
        let rows = lanes.iter().map(|lane| lane.row + 1).max().unwrap_or(0);
        let blocks = lanes.iter().map(|lane| lane.position / PAGE + 1).max().unwrap_or(0);
        // Longer than needed, so that it seldom changes.
        let length = if blocks > self.length { blocks.next_power_of_two() } else { self.length };
        let plain = quantization.map_or(0, |q| q.start.div_ceil(PAGE).min(MOST)) as u32;
        let mut settings = vec![0u32; 4 * rows];
        let mut pages = vec![0u32; layers * rows * length];
        for row in lanes.chunk_by(|a, b| a.row == b.row).map(|lanes| lanes[0].row) {
            if let Some(layer) = full {
                let table = tables.table(layer, row);
                settings[4 * row] = table.window().min(MOST) as u32;
                settings[4 * row + 1] = table.sinks().min(MOST) as u32;
            }
            settings[4 * row + 2] = plain;
            for layer in 0..layers {
                let table = tables.table(layer, row);
                for block in table.blocks().filter(|block| *block < length) {
                    pages[(layer * rows + row) * length + block] = table.device_page(block);
                }
            }
        }
        (self.length, self.rows_of_tables) = (length, rows);
        self.rows.set(ctx, &settings);
        self.tables.set(ctx, &pages);
    }

    /// Makes the angles reach so many positions, computed in f64.
    fn extend_angles(&mut self, positions: usize) {
        if positions <= self.positions {
            return;
        }
        let dim = self.sizes.heads.dim;
        self.positions = positions.next_power_of_two().max(1024);
        let mut angles = vec![0f32; self.positions * dim];
        for (position, angles) in angles.chunks_exact_mut(dim).enumerate() {
            rotations(&self.frequencies, position, angles);
        }
        self.angles = Some(storage::tensor(angles, (self.positions, dim)));
    }

    /// Notes what the device has once a pass has chosen ids: they, and the positions after its outputs'.
    pub(super) fn chosen(&mut self, step: &Step, (ids, lanes): (Value, Value)) {
        let next = step.outputs.iter().map(|i| &step.lanes[*i]);
        let next = next.flat_map(|lane| [lane.row as u32, lane.position as u32 + 1]).collect();
        self.lanes = Mirrored { host: Some(next), device: Some(lanes) };
        self.ids = Mirrored { host: None, device: Some(ids) };
    }

    pub(super) fn angles(&self) -> Result<&Tensor> {
        self.angles.as_ref().ok_or_else(|| Error::op("decode", "a pass that was begun", "none"))
    }

    pub(super) fn lanes(&self) -> Result<&Tensor> {
        self.lanes.get()
    }

    pub(super) fn ids(&self) -> Result<&Tensor> {
        self.ids.get()
    }

    pub(super) fn rows(&self) -> Result<&Tensor> {
        self.rows.get()
    }

    pub(super) fn tables(&self) -> Result<&Tensor> {
        self.tables.get()
    }

    pub(super) fn outputs(&self) -> Result<&Tensor> {
        self.outputs.get()
    }

    pub(super) fn choosing(&self) -> Result<&Tensor> {
        self.choosing.get()
    }

    /// Where a layer's tables begin, and how long a row's is.
    pub(super) fn table(&self, layer: usize) -> (usize, usize) {
        (layer * self.rows_of_tables * self.length, self.length)
    }
}
