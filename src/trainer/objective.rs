//! What a step makes smaller. The loop and the step are the same for all of them: a recipe passes one in.

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::model::gpt::{Batch, Gpt};
use crate::nn::attention::Layout;
use crate::nn::dropout::Dropout;
use crate::ops::ctx::{Ctx, Value};
use crate::ops::distillation::{self, Settings, Teacher};
use crate::ops::{add, cross_entropy};

/// A loss over the targets of a micro-batch.
pub trait Objective {
    /// Forward and backward: adds to the gradient slots of `model`, and returns the loss (1), a sum over the valid targets
    /// times `scale`.
    fn accumulate(&mut self, ctx: &mut Ctx, model: &Gpt, batch: &Batch, scale: f32, dropout: Dropout) -> Result<Value>;
}

/// -ln p of what comes next: cross-entropy with the data.
pub struct NextToken;

impl Objective for NextToken {
    fn accumulate(&mut self, ctx: &mut Ctx, model: &Gpt, batch: &Batch, scale: f32, dropout: Dropout) -> Result<Value> {
        model.accumulate(ctx, batch, scale, dropout)
    }
}

/// Continues prompts with a model: (model, prompts, tokens of each whole sequence, seed) -> sequences. The engine reaches the
/// trainer through this alone.
pub type Generate = dyn FnMut(&Gpt, Vec<Vec<u32>>, usize, u64) -> Result<Vec<Vec<u32>>>;

/// What a teacher would say, at a temperature, mixed with the data.
pub struct Distillation {
    pub teacher: Gpt,
    pub settings: Settings,
    /// The share of windows that the student continues itself, and how (Agarwal et al., "On-Policy Distillation of Language
    /// Models", 2023).
    pub on_policy: Option<(f64, Box<Generate>)>,
    /// What the teacher said before.
    pub memory: Option<Box<dyn Memory>>,
}

/// The teacher's likeliest tokens for windows of the stream.
pub trait Memory {
    /// Tokens that are kept of each row.
    fn k(&self) -> usize;
    /// Ids and ln q of all rows of a window, if they are known.
    fn get(&mut self, window: u64) -> Result<Option<(Vec<u32>, Vec<f32>)>>;
    fn put(&mut self, window: u64, ids: &[u32], logprobs: &[f32]) -> Result<()>;
}

impl Objective for Distillation {
    fn accumulate(&mut self, ctx: &mut Ctx, model: &Gpt, batch: &Batch, scale: f32, dropout: Dropout) -> Result<Value> {
        let (own, data) = self.split(batch);
        let mut loss = None;
        if !data.is_empty() {
            let rows = select(batch, &data);
            let windows: Vec<u64> = data.iter().map(|row| batch.window + *row as u64).collect();
            loss = Some(self.learn_from_data(ctx, model, (&rows, &windows), scale, dropout)?);
        }
        if !own.is_empty() {
            let rows = self.continued(model, select(batch, &own), batch.window + own[0] as u64)?;
            let settings = Settings { alpha: 1.0, ..self.settings };
            let more = self.learn_from_teacher(ctx, model, &rows, (settings, scale), dropout)?;
            loss = Some(match loss {
                None => more,
                Some(loss) => sum(ctx, &loss, &more)?,
            });
        }
        loss.ok_or_else(|| Error::op("distillation", "a batch of at least one window", "none"))
    }
}

impl Distillation {
    /// The rows of a batch that the student continues, and the others. Like the sources of a mixture, every share is met to
    /// within one window at every moment.
    fn split(&self, batch: &Batch) -> (Vec<usize>, Vec<usize>) {
        let share = self.on_policy.as_ref().map_or(0.0, |(share, _)| *share);
        let taken = |n: u64| (n as f64 * share).floor();
        let own = |row: &usize| taken(batch.window + *row as u64 + 1) > taken(batch.window + *row as u64);
        (0..batch.inputs.len() / batch.layout.seq.max(1)).partition(own)
    }

    /// Rows of data: from memory if all of them are known, else from the teacher.
    fn learn_from_data(
        &mut self,
        ctx: &mut Ctx,
        model: &Gpt,
        (batch, windows): (&Batch, &[u64]),
        scale: f32,
        dropout: Dropout,
    ) -> Result<Value> {
        let Some(memory) = &mut self.memory else {
            return self.learn_from_teacher(ctx, model, batch, (self.settings, scale), dropout);
        };
        let (k, seq) = (memory.k(), batch.layout.seq);
        let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
        for (row, window) in windows.iter().enumerate() {
            // What is kept may be damaged: then the teacher is asked again.
            let fits = |known: &(Vec<u32>, Vec<f32>)| {
                known.0.len() == seq * k && known.0.iter().all(|id| (*id as usize) < model.config.vocab_size)
            };
            let known = match memory.get(*window)?.filter(fits) {
                Some(known) => known,
                None => {
                    let one = select(batch, &[row]);
                    let top = top(ctx, &self.teacher, &one, k)?;
                    memory.put(*window, &top.0, &top.1)?;
                    top
                }
            };
            ids.extend(known.0);
            logprobs.extend(known.1);
        }
        let teacher = Teacher::Top { k, ids: &ids, logprobs: &logprobs };
        model.accumulate_with(ctx, batch, dropout, &mut |ctx, x, w, wanted| {
            distillation::forward(ctx, (x, w), teacher, &batch.targets, (self.settings, scale), wanted)
        })
    }

    fn learn_from_teacher(
        &self,
        ctx: &mut Ctx,
        model: &Gpt,
        batch: &Batch,
        (settings, scale): (Settings, f32),
        dropout: Dropout,
    ) -> Result<Value> {
        let hidden = self.teacher.states(ctx, batch)?;
        let head = self.teacher.head(ctx)?;
        let teacher = Teacher::Model { x: hidden.value(), weight: &head };
        model.accumulate_with(ctx, batch, dropout, &mut |ctx, x, w, wanted| {
            distillation::forward(ctx, (x, w), teacher, &batch.targets, (settings, scale), wanted)
        })
    }

    /// The windows with all but their first quarter replaced by what the student goes on with.
    fn continued(&mut self, model: &Gpt, mut batch: Batch, seed: u64) -> Result<Batch> {
        let Some((_, generate)) = &mut self.on_policy else { return Ok(batch) };
        let seq = batch.layout.seq;
        let prompts = batch.inputs.chunks(seq).map(|row| row[..seq.div_ceil(4)].to_vec()).collect();
        let rows = generate(model, prompts, seq, seed)?;
        if rows.iter().any(|row| row.len() != seq) {
            return Err(Error::op("distillation", format!("rows of {seq} tokens"), "others"));
        }
        batch.inputs = rows.concat();
        Ok(batch)
    }
}

/// Some rows of a batch.
fn select(batch: &Batch, rows: &[usize]) -> Batch {
    let seq = batch.layout.seq;
    let of = |all: &[u32]| rows.iter().flat_map(|row| all[row * seq..(row + 1) * seq].to_vec()).collect::<Vec<u32>>();
    let starts = batch.layout.starts.as_ref().map(|starts| of(starts).into());
    let layout = Layout { seq, starts };
    Batch { inputs: of(&batch.inputs), targets: of(&batch.targets), layout, window: batch.window }
}

/// The `k` likeliest tokens of every row, best first, with ln q.
fn top(ctx: &mut Ctx, teacher: &Gpt, batch: &Batch, k: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    let hidden = teacher.states(ctx, batch)?;
    let head = teacher.head(ctx)?;
    let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
    cross_entropy::log_softmax_rows(ctx, hidden.value(), &head, &mut |row| {
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        let best = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        if k < order.len() {
            order.select_nth_unstable_by(k, best);
            order.truncate(k);
        }
        order.sort_unstable_by(best);
        logprobs.extend(order.iter().map(|id| row[*id as usize]));
        ids.extend(order);
    })?;
    Ok((ids, logprobs))
}

fn sum(ctx: &mut Ctx, a: &Tensor, b: &Tensor) -> Result<Value> {
    let total = add::copy(ctx, a)?;
    add::add_assign(ctx, &total, b)?;
    Ok(total)
}
