//! Tests of `weights`: equal bytes, every stored type, and a clear word for every kind of damage.

use safetensors::tensor::TensorView;

use super::*;

fn tensors() -> Vec<NamedTensor> {
    vec![
        NamedTensor { name: "b".into(), shape: vec![2, 3], data: (0..6).map(|x| x as f32).collect() },
        NamedTensor { name: "a".into(), shape: vec![2], data: vec![f32::MIN_POSITIVE, -0.0] },
    ]
}

fn open_error(path: &Path, bytes: &[u8]) -> String {
    std::fs::write(path, bytes).unwrap();
    Weights::open(path).err().unwrap().to_string()
}

#[test]
fn tensors_come_back_bit_for_bit_and_equal_ones_give_equal_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let bytes = to_bytes(&tensors()).unwrap();
    let mut reversed = tensors();
    reversed.reverse();
    crate::files::atomic::write(&path, Tensors(&reversed)).unwrap();
    assert_eq!(bytes, std::fs::read(&path).unwrap());
    let weights = Weights::open(&path).unwrap();
    for t in tensors() {
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(weights.get(&t.name, &t.shape).unwrap()), bits(t.data));
    }
}

#[test]
fn the_bytes_are_those_of_the_safetensors_crate() {
    let tensors = tensors();
    let raw: Vec<Vec<u8>> = tensors.iter().map(|t| t.data.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let views =
        tensors.iter().zip(&raw).map(|(t, b)| (&t.name, TensorView::new(Dtype::F32, t.shape.clone(), b).unwrap()));
    let format = [("format".to_owned(), "pt".to_owned())].into();
    assert_eq!(to_bytes(&tensors).unwrap(), safetensors::serialize(views, Some(format)).unwrap());
}

#[test]
fn what_cannot_be_written_is_an_error() {
    let mut twice = tensors();
    twice[1].name = "b".into();
    assert!(to_bytes(&twice).unwrap_err().to_string().contains("b twice"));
    let mut short = tensors();
    short[0].data.pop();
    assert!(to_bytes(&short).is_err());
    assert!(to_bytes(&[]).is_ok());
}

#[test]
fn half_types_are_read_and_others_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let (brain, half, byte) = (bf16::from_f32(-1.5).to_le_bytes(), f16::from_f32(0.25).to_le_bytes(), [7u8; 2]);
    let view = |dtype, bytes| TensorView::new(dtype, vec![1], bytes).unwrap();
    let views =
        [("brain", view(Dtype::BF16, &brain)), ("half", view(Dtype::F16, &half)), ("int", view(Dtype::I16, &byte))];
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let weights = Weights::open(&path).unwrap();
    assert_eq!(weights.get("brain", &[1]).unwrap(), [-1.5]);
    assert_eq!(weights.get("half", &[1]).unwrap(), [0.25]);
    let error = weights.get("int", &[1]).unwrap_err().to_string();
    assert!(error.contains("f32, bf16 or f16") && error.contains("i16"), "{error}");
}

#[test]
fn every_kind_of_damage_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let good = to_bytes(&tensors()).unwrap();
    let header = u64::from_le_bytes(*good.first_chunk().unwrap()) as usize;
    let mut broken = good.clone();
    broken[8] = b'x';
    let longer = [&good[..], b"x"].concat();
    let cases: &[(&[u8], String)] = &[
        (b"", "found an empty file".into()),
        (b"<!DOCTYPE html><html>", "found a web page (HTML)".into()),
        (b"version https://git-lfs.github.com/spec/v1\n", "found a git-lfs pointer".into()),
        (b"Entry not found", "15 bytes that begin with \"Entry not found\"".into()),
        (b"abc", "3 bytes, too few".into()),
        (&[0; 64], "nothing but zero bytes".into()),
        (&good[..12], format!("found 12 bytes, the header alone promises {}", 8 + header)),
        (&good[..good.len() - 1], format!("found {} bytes, the header promises {}", good.len() - 1, good.len())),
        (&longer, format!("found {} bytes, the header promises {}", good.len() + 1, good.len())),
        (&broken, "a header that is not valid".into()),
    ];
    for (bytes, said) in cases {
        let error = open_error(&path, bytes);
        assert!(error.contains("model.safetensors") && error.contains(said.as_str()), "{error} against {said}");
    }
    std::fs::write(&path, &good).unwrap();
    let weights = Weights::open_folder(dir.path()).unwrap();
    let error = weights.get("b", &[3, 2]).unwrap_err().to_string();
    assert!(error.contains("`b`") && error.contains("[3, 2]") && error.contains("[2, 3]"), "{error}");
    assert!(weights.get("c", &[1]).unwrap_err().to_string().contains("no such tensor"));
}

#[test]
fn a_reader_keeps_the_file_that_it_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    crate::files::atomic::write(&path, Tensors(&tensors())).unwrap();
    let weights = Weights::open(&path).unwrap();
    let other = NamedTensor { name: "a".into(), shape: vec![1], data: vec![9.0] };
    crate::files::atomic::write(&path, Tensors(&[other])).unwrap();
    assert_eq!(weights.get("b", &[2, 3]).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn shards_are_read_and_their_faults_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let [b, a]: [NamedTensor; 2] = tensors().try_into().ok().unwrap();
    std::fs::write(at("m-1.safetensors"), to_bytes(&[a]).unwrap()).unwrap();
    std::fs::write(at("m-2.safetensors"), to_bytes(&[b]).unwrap()).unwrap();
    let open = |index: &str| {
        std::fs::write(at(INDEX), index).unwrap();
        Weights::open_folder(dir.path())
    };
    let weights = open(r#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#).unwrap();
    assert_eq!(weights.get("b", &[2, 3]).unwrap()[5], 5.0);
    assert!(weights.get("c", &[1]).unwrap_err().to_string().contains(INDEX));
    for (index, said) in [
        (r#"{"weight_map": {}}"#, "weight_map"),
        (r#"{"weight_map": {"a": 1}}"#, "shard of tensor `a`, found 1"),
        (r#"{"weight_map": {"b": "m-1.safetensors"}}"#, "m-1.safetensors: tensor `b`: expected in this shard"),
        (r#"{"weight_map": {"a": "m-3.safetensors"}}"#, "m-3.safetensors"),
        ("<html>", "a web page"),
        ("[]", "a JSON object, found a list"),
    ] {
        let error = open(index).err().unwrap().to_string();
        assert!(error.contains(said), "{error} against {said}");
    }
}

#[test]
fn a_folder_without_weights_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Weights::open_folder(dir.path()).err().unwrap();
    assert!(error().to_string().contains("model.safetensors"));
    std::fs::create_dir(dir.path().join("steps")).unwrap();
    assert!(error().hint().unwrap().contains("--resume"));
    std::fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    assert!(error().to_string().contains("found pytorch_model.bin"));
}
