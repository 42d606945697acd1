//! The table of kernels against what the sources declare.

use std::collections::{BTreeMap, BTreeSet};

use fancy_regex::Regex;
use gpt::ops::gpu::kernels::{ALL, Kernel};
use gpt::ops::gpu::{Access, Element, Number};

use super::emulator::{root, source};
use super::translate::{Instance, Source, read};

/// The fields of a struct of numbers, as (name, type).
fn fields(text: &str, name: &str) -> Vec<(String, String)> {
    let found = Regex::new(&format!(r"struct {name} \{{([^}}]*)\}};")).unwrap().captures(text).unwrap();
    let found = found.unwrap_or_else(|| panic!("no struct {name}"));
    let field = |field: &str| {
        let (ty, name) = field.trim().split_once(' ')?;
        Some((name.to_string(), ty.to_string()))
    };
    found[1].split(';').filter_map(field).collect()
}

/// What is wrong with a function, as the table sees it.
fn compare(kernel: &Kernel, text: &str, instance: &Instance) -> Vec<String> {
    let mut wrong = Vec::new();
    let buffers: BTreeMap<usize, _> = instance.parameters.iter().filter_map(|p| Some((p.buffer()?, p))).collect();
    let expected = kernel.slots.len() + usize::from(!kernel.numbers.is_empty());
    if buffers.keys().copied().collect::<Vec<_>>() != (0..expected).collect::<Vec<_>>() {
        wrong.push(format!("buffers {:?} of {expected}", buffers.keys()));
    }
    for (i, slot) in kernel.slots.iter().enumerate() {
        let Some(found) = buffers.get(&i) else { continue };
        let ty = match slot.element {
            Element::T => "T",
            Element::F32 => "float",
            Element::U32 => "uint",
            Element::Bytes => "uchar",
        };
        let constant = if slot.access == Access::Read { "const " } else { "" };
        let declared = (format!("device {constant}{ty}*"), slot.name.to_string());
        if (found.ty.clone(), found.name.clone()) != declared {
            wrong.push(format!(
                "buffer {i} is `{} {}`, the table says `{} {}`",
                found.ty, found.name, declared.0, declared.1
            ));
        }
    }
    if let Some(found) = buffers.get(&kernel.slots.len()) {
        let name = found.ty.trim_start_matches("constant ").trim_end_matches('&');
        let declared: Vec<(String, String)> = kernel
            .numbers
            .iter()
            .map(|(name, kind)| (name.to_string(), if *kind == Number::U32 { "uint" } else { "float" }.to_string()))
            .collect();
        if fields(text, name) != declared {
            wrong.push(format!("{name} has {:?}, the table says {declared:?}", fields(text, name)));
        }
    }
    wrong
}

#[test]
fn every_kernel_has_the_arguments_that_the_table_says() {
    let mut wrong = Vec::new();
    for kernel in ALL {
        let Source { text, instances } = read(&source(kernel.file));
        for name in kernel.functions() {
            match instances.iter().find(|i| i.name == name) {
                None => wrong.push(format!("{}.metal has no `{name}`", kernel.file)),
                Some(instance) => {
                    wrong.extend(compare(kernel, &text, instance).into_iter().map(|w| format!("{name}: {w}")))
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_function_of_the_sources_is_in_the_table_and_every_name_is_one_functions() {
    let files: BTreeSet<String> = std::fs::read_dir(root().join("kernels/metal"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|stem| stem != "prelude")
        .collect();
    assert_eq!(files, ALL.iter().map(|k| k.file.to_string()).collect::<BTreeSet<_>>(), "files");
    let mut names = BTreeSet::new();
    for kernel in ALL {
        kernel
            .functions()
            .into_iter()
            .for_each(|name| assert!(names.insert(name), "two kernels named {}", kernel.name));
    }
    let functions = files.iter().flat_map(|file| read(&source(file)).instances).map(|i| i.name);
    assert_eq!(functions.collect::<BTreeSet<_>>(), names);
}

/// The stems of the files and folders of a folder of src/ops.
fn stems(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let stems = entries.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned());
    stems.filter(|stem| stem != "mod" && stem != "decode").collect()
}

#[test]
fn every_stem_of_the_ops_has_a_kernel_file_or_a_reason() {
    let readme = std::fs::read_to_string(root().join("kernels/README.md")).unwrap();
    let reasons = readme.split("## Stems").nth(1).unwrap();
    let all = [stems("src/ops"), stems("src/ops/decode")].concat();
    let has_file = |stem: &str| root().join(format!("kernels/metal/{stem}.metal")).exists();
    for stem in &all {
        let explained = reasons.contains(&format!("`{stem}`"));
        assert!(has_file(stem) != explained, "{stem}: a file, or a reason in kernels/README.md");
    }
}
