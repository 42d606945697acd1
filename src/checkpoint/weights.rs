//! Named f32 tensors as safetensors files, and their careful reading: one clear error for anything that is not as it should be.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::error::{Error, Result};
use crate::nn::parameter::NamedTensor;

/// The bytes of a safetensors file. Equal tensors give equal bytes: sorted by name, one metadata key.
pub fn to_bytes(tensors: &[NamedTensor]) -> Result<Vec<u8>> {
    let raw: Vec<(&NamedTensor, Vec<u8>)> =
        tensors.iter().map(|t| (t, t.data.iter().flat_map(|x| x.to_le_bytes()).collect())).collect();
    let mut views = BTreeMap::new();
    for (tensor, bytes) in &raw {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes);
        let view =
            view.map_err(|e| Error::op("safetensors", "data of the tensor's shape", format!("{}: {e}", tensor.name)))?;
        views.insert(tensor.name.clone(), view);
    }
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize(views, Some(metadata)).map_err(|e| Error::failed(format!("safetensors: {e}")))
}

/// The tensors of one or several safetensors files.
pub struct Weights {
    /// The file's bytes, its path, and where its tensor data begins.
    files: Vec<(PathBuf, Vec<u8>)>,
    /// Name -> (file, dtype, shape, byte range within the file).
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
}

impl Weights {
    /// Opens one file.
    pub fn open(path: &Path) -> Result<Self> {
        let mut weights = Self { files: Vec::new(), entries: BTreeMap::new() };
        weights.add(path)?;
        Ok(weights)
    }

    /// Opens the model.safetensors of a folder, or the shards that its index names.
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        if single.exists() || !index.exists() {
            return Self::open(&single);
        }
        let text = std::fs::read_to_string(&index).map_err(|e| Error::io("read", &index, e))?;
        let json: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| Error::file(&index, "an index of shards", e.to_string()))?;
        let map = json["weight_map"].as_object();
        let map = map.ok_or_else(|| Error::file(&index, "a weight_map", "none"))?;
        let shards: std::collections::BTreeSet<&str> = map.values().filter_map(|v| v.as_str()).collect();
        let mut weights = Self { files: Vec::new(), entries: BTreeMap::new() };
        for shard in shards {
            // A shard lies beside its index, whatever the index says.
            let name = Path::new(shard).file_name().unwrap_or_default();
            weights.add(&folder.join(name))?;
        }
        Ok(weights)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
        let parsed = SafeTensors::deserialize(&bytes).map_err(|e| {
            Error::file(path, "a safetensors file", what_instead(&bytes, &e.to_string()))
                .with_hint("the file is incomplete or not what its name says; copy or download it again")
        })?;
        let base = bytes.as_ptr() as usize;
        for (name, view) in parsed.iter() {
            let start = view.data().as_ptr() as usize - base;
            let (shape, range) = (view.shape().to_vec(), start..start + view.data().len());
            self.entries.insert(name.to_owned(), Entry { file: self.files.len(), dtype: view.dtype(), shape, range });
        }
        self.files.push((path.to_owned(), bytes));
        Ok(())
    }

    /// (name, dtype, shape) of every tensor, sorted by name.
    pub fn list(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.entries
            .iter()
            .map(|(name, e)| (name.as_str(), format!("{:?}", e.dtype).to_lowercase(), e.shape.as_slice()))
    }

    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The tensor of that name as f32. It must have `shape`; f32, bf16 and f16 are read.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let place = |entry: Option<&Entry>| self.files[entry.map_or(0, |e| e.file)].0.clone();
        let wrong = |entry: Option<&Entry>, expected: String, found: String| Error::Tensor {
            path: place(entry),
            tensor: name.to_owned(),
            expected,
            found,
        };
        let Some(entry) = self.entries.get(name) else {
            return Err(wrong(None, format!("shape {shape:?}"), "no such tensor".into()));
        };
        if entry.shape != shape {
            return Err(wrong(Some(entry), format!("shape {shape:?}"), format!("{:?}", entry.shape)));
        }
        let bytes = &self.files[entry.file].1[entry.range.clone()];
        let pairs = || bytes.as_chunks::<2>().0.iter();
        match entry.dtype {
            Dtype::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::BF16 => Ok(pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()),
            Dtype::F16 => Ok(pairs().map(|b| f16::from_le_bytes(*b).to_f32()).collect()),
            other => Err(wrong(Some(entry), "f32, bf16 or f16".into(), format!("{other:?}").to_lowercase())),
        }
    }
}

/// What a file that is no safetensors file looks like.
fn what_instead(bytes: &[u8], parser: &str) -> String {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(64)]).trim_start().to_lowercase();
    if bytes.is_empty() {
        return "an empty file".into();
    }
    if start.starts_with("<!doctype") || start.starts_with("<html") {
        return "a web page (HTML)".into();
    }
    if start.starts_with("version https://git-lfs") {
        return "a git-lfs pointer instead of the file".into();
    }
    if let Some(length) = bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b))
        && length < 100_000_000
        && (bytes.len() as u64) < 8 + length
    {
        return format!("{} bytes where the header alone is {}: the file is cut short", bytes.len(), 8 + length);
    }
    format!("{} bytes that cannot be read ({parser})", bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors() -> Vec<NamedTensor> {
        vec![
            NamedTensor { name: "b".into(), shape: vec![2, 3], data: (0..6).map(|x| x as f32).collect() },
            NamedTensor { name: "a".into(), shape: vec![2], data: vec![f32::MIN_POSITIVE, -0.0] },
        ]
    }

    #[test]
    fn tensors_come_back_bit_for_bit_and_equal_ones_give_equal_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let bytes = to_bytes(&tensors()).unwrap();
        let mut reversed = tensors();
        reversed.reverse();
        assert_eq!(bytes, to_bytes(&reversed).unwrap());
        std::fs::write(&path, bytes).unwrap();
        let weights = Weights::open(&path).unwrap();
        for t in tensors() {
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(weights.get(&t.name, &t.shape).unwrap()), bits(t.data));
        }
    }

    #[test]
    fn every_kind_of_damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let good = to_bytes(&tensors()).unwrap();
        let said = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Weights::open(&path).err().unwrap().to_string()
        };
        assert!(said(b"").contains("an empty file"));
        assert!(said(b"<!DOCTYPE html><html>").contains("a web page"));
        assert!(said(b"version https://git-lfs.github.com/spec/v1\n").contains("git-lfs pointer"));
        assert!(said(&good[..40]).contains("cut short"));
        assert!(said(&good[..good.len() - 1]).contains("model.safetensors"));
        std::fs::write(&path, &good).unwrap();
        let weights = Weights::open(&path).unwrap();
        let error = weights.get("b", &[3, 2]).unwrap_err().to_string();
        assert!(error.contains("`b`") && error.contains("[3, 2]") && error.contains("[2, 3]"), "{error}");
        assert!(weights.get("c", &[1]).unwrap_err().to_string().contains("no such tensor"));
        assert!(Weights::open_folder(dir.path()).is_ok());
        std::fs::remove_file(&path).unwrap();
        assert!(Weights::open_folder(dir.path()).err().unwrap().to_string().contains("model.safetensors"));
    }
}
