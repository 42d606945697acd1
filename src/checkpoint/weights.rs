//! Named tensors as safetensors files: streamed out as f32, and read one by one with a clear error for anything that is not
//! as it should be.
//!
//! Written by `model_folder` and `steps`; read by them and by everything that builds a model. What must stay true: equal
//! tensors give equal bytes, and no more than one tensor of a file is in memory beside what the caller keeps.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use parking_lot::Mutex;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::foreign;
use crate::error::{Error, Result};
use crate::files::atomic::{Fill, Sink};
use crate::nn::parameter::NamedTensor;

pub const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// What numbers are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    F32,
    Bf16,
    F16,
}

impl StoredType {
    pub const ALL: [StoredType; 3] = [StoredType::F32, StoredType::Bf16, StoredType::F16];

    pub fn name(self) -> &'static str {
        match self {
            StoredType::F32 => "f32",
            StoredType::Bf16 => "bf16",
            StoredType::F16 => "f16",
        }
    }

    /// The name in PyTorch.
    pub fn torch_name(self) -> &'static str {
        match self {
            StoredType::F32 => "float32",
            StoredType::Bf16 => "bfloat16",
            StoredType::F16 => "float16",
        }
    }

    pub fn named(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|stored| stored.name() == name)
            .ok_or_else(|| Error::usage(format!("a dtype `{name}`")).with_hint("one of: f32, bf16, f16"))
    }

    fn dtype(self) -> Dtype {
        match self {
            StoredType::F32 => Dtype::F32,
            StoredType::Bf16 => Dtype::BF16,
            StoredType::F16 => Dtype::F16,
        }
    }

    fn bytes(self) -> usize {
        if self == StoredType::F32 { 4 } else { 2 }
    }

    fn push(self, numbers: &[f32], bytes: &mut Vec<u8>) {
        match self {
            StoredType::F32 => bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes())),
            StoredType::Bf16 => bytes.extend(numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
            StoredType::F16 => bytes.extend(numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
        }
    }
}

/// Tensors in f32 to be written as a safetensors file, without a second copy of them in memory.
pub struct Tensors<'a>(pub &'a [NamedTensor]);

impl Fill for Tensors<'_> {
    fn fill(&self, sink: &mut Sink) -> Result<()> {
        encode(self.0, &mut |bytes| sink.write(bytes))
    }
}

/// The numbers of a tensor of that name and shape.
pub type Make<'a> = dyn Fn(&str, &[usize]) -> Result<Vec<f32>> + 'a;

/// Tensors that are made one after the other while they are written.
pub struct Made<'a> {
    /// Name, shape and type of each.
    pub tensors: &'a [(String, Vec<usize>, StoredType)],
    pub get: &'a Make<'a>,
}

impl Fill for Made<'_> {
    fn fill(&self, sink: &mut Sink) -> Result<()> {
        encode_with(self.tensors.to_vec(), &|name, shape| (self.get)(name, shape).map(Cow::Owned), &mut |bytes| {
            sink.write(bytes)
        })
    }
}

/// The bytes of a safetensors file in memory.
pub fn to_bytes(tensors: &[NamedTensor]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    encode(tensors, &mut |part| {
        bytes.extend_from_slice(part);
        Ok(())
    })?;
    Ok(bytes)
}

fn encode(tensors: &[NamedTensor], write: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let list = tensors.iter().map(|t| (t.name.clone(), t.shape.clone(), StoredType::F32)).collect();
    let by_name: BTreeMap<&str, &[f32]> = tensors.iter().map(|t| (t.name.as_str(), t.data.as_slice())).collect();
    encode_with(list, &|name, _| Ok(Cow::Borrowed(by_name[name])), write)
}

type Get<'a> = dyn Fn(&str, &[usize]) -> Result<Cow<'a, [f32]>> + 'a;

/// Sorted by name and with one metadata key, because the crate orders metadata at random.
fn encode_with(
    mut tensors: Vec<(String, Vec<usize>, StoredType)>,
    get: &Get,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::op("safetensors", "every name once", format!("{} twice", pair[0].0)));
    }
    let mut end = 0;
    let infos = tensors.iter().map(|(name, shape, stored)| {
        let start = end;
        end += stored.bytes() * shape.iter().product::<usize>();
        (name.clone(), TensorInfo { dtype: stored.dtype(), shape: shape.clone(), data_offsets: (start, end) })
    });
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let header = Metadata::new(Some(format), infos.collect())
        .map_err(|e| Error::op("safetensors", "data of the tensors' shapes", e.to_string()))?;
    let mut header = serde_json::to_vec(&header).expect("names, numbers and lists");
    header.resize(header.len().next_multiple_of(8), b' ');
    write(&(header.len() as u64).to_le_bytes())?;
    write(&header)?;
    let mut buffer = Vec::with_capacity(4 << 14);
    for (name, shape, stored) in &tensors {
        let data = get(name, shape)?;
        if data.len() != shape.iter().product::<usize>() {
            return Err(Error::op(
                "safetensors",
                format!("{name} of shape {shape:?}"),
                format!("{} numbers", data.len()),
            ));
        }
        for chunk in data.chunks(1 << 14) {
            buffer.clear();
            stored.push(chunk, &mut buffer);
            write(&buffer)?;
        }
    }
    Ok(())
}

/// The tensors of one or several safetensors files. The files stay open: replacing them by rename does not disturb a reader.
pub struct Weights {
    /// What was opened: the file, or the index of the shards.
    origin: PathBuf,
    files: Vec<(PathBuf, Mutex<File>)>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes within the file.
    range: Range<u64>,
}

impl Weights {
    /// Opens one file.
    pub fn open(path: &Path) -> Result<Self> {
        let mut weights = Self { origin: path.to_owned(), files: Vec::new(), entries: BTreeMap::new() };
        weights.add(path)?;
        Ok(weights)
    }

    /// Opens the model.safetensors of a folder, or the shards that its index names.
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        match (single.exists(), index.exists()) {
            (true, _) => Self::open(&single),
            (false, true) => Self::open_shards(folder, &index),
            (false, false) => Err(no_weights(folder)),
        }
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self> {
        let json = foreign::read_json(index)?;
        let map = json.get("weight_map").and_then(|m| m.as_object()).filter(|m| !m.is_empty());
        let map = map.ok_or_else(|| Error::file(index, "a weight_map that names the shards", "none"))?;
        let mut weights = Self { origin: index.to_owned(), files: Vec::new(), entries: BTreeMap::new() };
        let mut opened = BTreeMap::new();
        for (tensor, shard) in map {
            let name = shard.as_str().and_then(|s| Path::new(s).file_name());
            let name = name
                .ok_or_else(|| Error::file(index, format!("the shard of tensor `{tensor}`"), foreign::kind(shard)))?;
            // A shard lies beside its index, whatever folder the index says.
            let path = folder.join(name);
            if !opened.contains_key(name) {
                opened.insert(name, weights.files.len());
                weights.add(&path)?;
            }
            if weights.entries.get(tensor).is_none_or(|e| e.file != opened[name]) {
                let expected = format!("in this shard, as {INDEX} says");
                return Err(Error::Tensor { path, tensor: tensor.clone(), expected, found: "no such tensor".into() });
            }
        }
        Ok(weights)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let mut file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let (header, start) = read_header(path, &mut file)?;
        for (name, info) in header.tensors() {
            let range = start + info.data_offsets.0 as u64..start + info.data_offsets.1 as u64;
            let entry = Entry { file: self.files.len(), dtype: info.dtype, shape: info.shape.clone(), range };
            self.entries.insert(name, entry);
        }
        self.files.push((path.to_owned(), Mutex::new(file)));
        Ok(())
    }

    /// (name, dtype, shape) of every tensor, sorted by name.
    pub fn list(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.entries
            .iter()
            .map(|(name, e)| (name.as_str(), format!("{:?}", e.dtype).to_lowercase(), e.shape.as_slice()))
    }

    /// What a tensor is stored in, if that is a type that can be written.
    pub fn stored(&self, name: &str) -> Option<StoredType> {
        let dtype = self.entries.get(name)?.dtype;
        StoredType::ALL.into_iter().find(|stored| stored.dtype() == dtype)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The tensor of that name as f32. It must have `shape`; f32, bf16 and f16 are read.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let wrong = |path: &Path, expected: String, found: String| {
            Err(Error::Tensor { path: path.to_owned(), tensor: name.to_owned(), expected, found })
        };
        let Some(entry) = self.entries.get(name) else {
            return wrong(&self.origin, format!("shape {shape:?}"), "no such tensor".into());
        };
        let (path, file) = &self.files[entry.file];
        if entry.shape != shape {
            return wrong(path, format!("shape {shape:?}"), format!("{:?}", entry.shape));
        }
        if !matches!(entry.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return wrong(path, "f32, bf16 or f16".into(), format!("{:?}", entry.dtype).to_lowercase());
        }
        let mut bytes = vec![0; (entry.range.end - entry.range.start) as usize];
        let mut file = file.lock();
        let read = file.seek(SeekFrom::Start(entry.range.start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|e| Error::io("read", path, e))?;
        let pairs = || bytes.as_chunks::<2>().0.iter();
        Ok(match entry.dtype {
            Dtype::BF16 => pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::F16 => pairs().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        })
    }
}

/// The header of a safetensors file whose size is what the header promises, and where the tensor data begins.
fn read_header(path: &Path, file: &mut File) -> Result<(Metadata, u64)> {
    const EXPECTED: &str = "a safetensors file";
    const HINT: &str = "the file is incomplete or not what its name says; copy or download it again";
    let wrong = |found: String| Error::file(path, EXPECTED, found).with_hint(HINT);
    let failed = |e| Error::io("read", path, e);
    let size = file.metadata().map_err(failed)?.len();
    let mut start = Vec::with_capacity(foreign::START);
    file.take(foreign::START as u64).read_to_end(&mut start).map_err(failed)?;
    foreign::refuse(path, &start, EXPECTED)?;
    let Some(length) = start.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(wrong(format!("{size} bytes, too few for a header")));
    };
    // The format's own limit; what is above it is no length but some text or other.
    if length > 100_000_000 {
        let text: String = String::from_utf8_lossy(&start).chars().take(40).collect();
        return Err(wrong(format!("{size} bytes that begin with {text:?}")));
    }
    if 8 + length > size {
        return Err(wrong(format!("{size} bytes, the header alone promises {}", 8 + length)));
    }
    let mut header = vec![0; length as usize];
    file.seek(SeekFrom::Start(8)).and_then(|_| file.read_exact(&mut header)).map_err(failed)?;
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|e| wrong(format!("a header that is not valid ({e})")))?;
    let promised = 8 + length + header.data_len() as u64;
    if promised != size {
        return Err(wrong(format!("{size} bytes, the header promises {promised}")));
    }
    Ok((header, 8 + length))
}

/// The error for a folder without weights that we read, naming what lies there instead.
fn no_weights(folder: &Path) -> Error {
    let expected = format!("{SINGLE} or {INDEX}");
    if folder.join("pytorch_model.bin").exists() || folder.join("pytorch_model.bin.index.json").exists() {
        let hint = "save the model as safetensors first (transformers: save_pretrained)";
        return Error::file(folder, expected, "pytorch_model.bin").with_hint(hint);
    }
    Error::file(folder, expected, "neither").with_hint(super::model_folder::no_model(folder))
}

#[cfg(test)]
mod tests;
