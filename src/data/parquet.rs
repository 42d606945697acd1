//! The texts of one column of a parquet file. Called by `format`.

use std::fs::File;
use std::path::Path;

use ::parquet::column::reader::ColumnReader;
use ::parquet::file::reader::{FileReader, SerializedFileReader};

use super::format::{Documents, Note};
use crate::error::{Error, Result};

/// Values that are read at a time.
const BATCH: usize = 256;

/// Each row's value of the column `field` is a document; rows without one are counted.
pub fn read(path: &Path, field: &str, to: &mut dyn Documents) -> Result<()> {
    let file = File::open(path).map_err(|e| Error::io("read", path, e))?;
    let reader = SerializedFileReader::new(file).map_err(|e| damaged(path, e))?;
    let schema = reader.metadata().file_metadata().schema_descr_ptr();
    let name = |i: usize| schema.column(i).path().string();
    let Some(column) = (0..schema.num_columns()).find(|i| name(*i) == field) else {
        let known = (0..schema.num_columns()).map(|i| format!("`{}`", name(i))).collect::<Vec<_>>().join(", ");
        return Err(Error::file(path, format!("a column `{field}`"), format!("only {known}"))
            .with_hint("name the column with --field"));
    };
    let optional = schema.column(column).max_def_level();
    if schema.column(column).max_rep_level() > 0 {
        return Err(Error::file(path, format!("one text a row in the column `{field}`"), "lists"));
    }
    let (mut values, mut levels) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(|e| damaged(path, e))?;
        let ColumnReader::ByteArrayColumnReader(mut texts) =
            group.get_column_reader(column).map_err(|e| damaged(path, e))?
        else {
            return Err(Error::file(path, format!("texts in the column `{field}`"), "numbers")
                .with_hint("name the column of the texts with --field"));
        };
        loop {
            values.clear();
            levels.clear();
            let (rows, _, _) =
                texts.read_records(BATCH, Some(&mut levels), None, &mut values).map_err(|e| damaged(path, e))?;
            if rows == 0 {
                break;
            }
            let lacking = levels.iter().filter(|level| **level < optional).count() as u64;
            if lacking > 0 {
                to.note(Note::Lacking, lacking);
            }
            for text in &values {
                let text = std::str::from_utf8(text.data()).map_err(|_| damaged(path, "a text that is not UTF-8"))?;
                to.text(text.as_bytes())?;
                to.end()?;
            }
        }
    }
    Ok(())
}

fn damaged(path: &Path, what: impl ToString) -> Error {
    Error::file(path, "a parquet file", what.to_string()).with_hint("it may be cut off: fetch it again")
}
