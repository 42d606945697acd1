//! The tokenizer of a checkpoint, held to the rows of its token table.
//!
//! Every command that gives a model the ids of a tokenizer opens it here. An id without a row would end the command only when it
//! comes up, which may be after hours of training.

use crate::checkpoint::model_folder::ModelFolder;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// The tokenizer in the folder of a model.
///
/// # Errors
/// Where there is none or it is damaged, and where it has an id, of an added token say, that the model has no row for.
pub fn tokenizer_of(folder: &ModelFolder) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::open(&folder.path)?;
    let (ids, rows) = (tokenizer.len(), folder.config.vocab_size);
    if ids <= rows {
        return Ok(tokenizer);
    }
    let expected =
        format!("a vocab_size of {ids} or more, for the ids that the tokenizer in {}", folder.path.display());
    let hint = "the two are not of one model: put the tokenizer.json beside it that the model was trained with, or give the \
                model rows for the added tokens (resize_token_embeddings in transformers)";
    Err(Error::file(folder.base.join("config.json"), format!("{expected} has"), format!("{rows}")).with_hint(hint))
}
