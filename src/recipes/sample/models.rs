//! The model of a `gpt sample` and its draft, opened and checked against each other.

use std::path::{Path, PathBuf};

use super::prefix::Origin;
use super::settings::Generation;
use super::{CacheSettings, WeightType};
use crate::checkpoint::{self, model_folder::ModelFolder};
use crate::engine::Engine;
use crate::engine::draft::Source;
use crate::error::{Error, Result};
use crate::ops::{ctx::Ctx, simd::Family};
use crate::recipes::report::{Event, Report};
use crate::recipes::vocabulary::tokenizer_of;
use crate::tokenizer::Tokenizer;

/// Which draft proposes tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum DraftChoice {
    /// The folder beside the checkpoint that is named like it with `-draft` at its end, if there is one.
    #[default]
    Beside,
    None,
    /// What followed the last tokens when they came up before.
    Ngram,
    Model(PathBuf),
}

pub struct Models {
    pub place: PathBuf,
    folder: ModelFolder,
    pub engine: Engine,
    pub kind: WeightType,
    pub tokenizer: Tokenizer,
    pub generation: Generation,
    pub draft: Option<Source>,
    draft_place: Option<PathBuf>,
}

impl Models {
    pub fn open(
        (checkpoint, adapters): (Option<&Path>, &[(PathBuf, f32)]),
        kind: Option<WeightType>,
        draft: &DraftChoice,
        family: Family,
        report: &mut dyn Report,
    ) -> Result<Self> {
        let place = checkpoint::resolve(checkpoint)?;
        if checkpoint.is_none() {
            report.event(Event::Note(format!("using {}", place.display())));
        }
        // Says best what is wrong with a folder that is no model.
        let folder = open_folder(&place, adapters)?;
        let vocab_size = folder.config.vocab_size;
        let tokenizer = tokenizer_of(&folder)?;
        let generation = Generation::open(&place)?;
        let draft_place = match draft {
            DraftChoice::None | DraftChoice::Ngram => None,
            DraftChoice::Model(path) => Some(checkpoint::resolve(Some(path))?),
            DraftChoice::Beside => beside(&place),
        };
        // Both work in turn, on the same threads: those of one would keep the cores from the other's.
        let ctx = Ctx::open(family);
        // A draft that does not fit is refused before the large model is loaded.
        let source = match (&draft_place, draft) {
            (Some(path), _) => {
                Some(Source::Model(Box::new(open_draft(&ctx, path, (&place, vocab_size, &tokenizer), kind)?)))
            }
            (None, DraftChoice::Ngram) => Some(Source::Ngram),
            (None, _) => None,
        };
        if let (Some(path), DraftChoice::Beside) = (&draft_place, draft) {
            report.event(Event::Note(format!("with the draft {}", path.display())));
        }
        let (engine, kind) = open_engine(&ctx, &folder, kind)?;
        Ok(Self { place, folder, engine, kind, tokenizer, generation, draft: source, draft_place })
    }

    /// The model and, if it has one, its draft model.
    pub fn engines(&mut self) -> Vec<&mut Engine> {
        let draft = match &mut self.draft {
            Some(Source::Model(engine)) => Some(&mut **engine),
            _ => None,
        };
        [Some(&mut self.engine), draft].into_iter().flatten().collect()
    }

    /// What the draft is called in reports.
    pub fn draft_name(&self) -> String {
        self.draft_place.as_ref().map_or_else(|| "ngram".to_owned(), |place| place.display().to_string())
    }

    /// What keys and values of this model depend on.
    pub fn origin(&self, cache: CacheSettings, family: Family) -> Result<Origin> {
        Ok(Origin {
            model: self.folder.hash()?,
            weights: self.kind.name().to_owned(),
            kernels: Ctx::open(family).kernels_name().to_owned(),
            cache: format!("{cache:?}"),
        })
    }
}

/// The draft of a checkpoint, by its name.
fn beside(place: &Path) -> Option<PathBuf> {
    let draft = checkpoint::draft_of(&place.canonicalize().ok()?);
    draft.join("config.json").is_file().then_some(draft)
}

/// A checkpoint with adapters on top.
pub fn open_folder(place: &Path, adapters: &[(PathBuf, f32)]) -> Result<ModelFolder> {
    adapters.iter().try_fold(ModelFolder::open(place)?, |folder, (path, scale)| folder.with_adapter(path, *scale))
}

/// The engine of a checkpoint and the type of its weights.
pub fn open_engine(ctx: &Ctx, folder: &ModelFolder, kind: Option<WeightType>) -> Result<(Engine, WeightType)> {
    let kind = kind.unwrap_or_else(|| stored_type(folder));
    let weights = |name: &str, shape: &[usize]| folder.get(name, shape);
    Ok((Engine::new(ctx.fork(), &folder.config, kind, weights)?, kind))
}

/// Opens a draft and holds its tokens to those of the target: its place, vocabulary and tokenizer.
fn open_draft(
    ctx: &Ctx,
    draft: &Path,
    (target, vocab_size, tokenizer): (&Path, usize, &Tokenizer),
    kind: Option<WeightType>,
) -> Result<Engine> {
    let folder = ModelFolder::open(draft)?;
    let own_size = folder.config.vocab_size;
    let own = tokenizer_of(&folder)?;
    let wrong = |found: String| {
        Error::file(draft, format!("a draft with the tokenizer of {}", target.display()), found)
            .with_hint("train or distil the draft with the same tokenizer, or use --no-draft")
    };
    if own.len() != tokenizer.len() {
        return Err(wrong(format!("{} tokens, not {}", own.len(), tokenizer.len())));
    }
    if let Some(id) = (0..own.len() as u32).find(|id| own.bytes_of(*id) != tokenizer.bytes_of(*id)) {
        let text = |tokenizer: &Tokenizer| String::from_utf8_lossy(tokenizer.bytes_of(id)).into_owned();
        return Err(wrong(format!("token {id} is {:?}, not {:?}", text(&own), text(tokenizer))));
    }
    if own.end_of_text() != tokenizer.end_of_text() {
        return Err(wrong(format!("{} ends a text, not {}", own.end_of_text(), tokenizer.end_of_text())));
    }
    if own_size != vocab_size {
        return Err(wrong(format!("a vocabulary of {own_size}, padding included, not {vocab_size}")));
    }
    // Blocks need rows of whole blocks, which a draft may not have: then it is kept as it is stored.
    match open_engine(ctx, &folder, kind) {
        Ok((engine, _)) => Ok(engine),
        Err(_) if kind.is_some() => Ok(open_engine(ctx, &folder, None)?.0),
        Err(error) => Err(error),
    }
}

/// The engine's type for what the checkpoint is stored in.
fn stored_type(folder: &ModelFolder) -> WeightType {
    let stored = folder.weights.list().find(|(name, ..)| *name == "model.embed_tokens.weight");
    if stored.is_some_and(|(_, dtype, _)| dtype == "bf16") { WeightType::Bf16 } else { WeightType::F32 }
}
