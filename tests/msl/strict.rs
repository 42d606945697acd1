//! The sources as strictly as clang can read them: address spaces apart, Metal's own overloads, every instantiation. The
//! emulator erases all of that, and Apple's compiler does not.

use std::io::Write;
use std::process::{Command, Stdio};

use fancy_regex::Regex;

use super::emulator::{available, clang, root, source};
use super::record::files;

/// A source for the check. Structs are not copied between address spaces by clang's C++, so the one that kernels copy is a
/// number here, and an array of structs in threadgroup memory lies elsewhere.
fn prepared(text: &str) -> String {
    let replaced = [
        (r"//[^\n]*", ""),
        (r"\bkernel\s+void\b", "void"),
        (r"template \[\[host_name\(name\)\]\] \[\[kernel\]\] ", "template "),
        (r"(?s)\[\[.*?\]\]", ""),
        (r"(?m)^(\s*)threadgroup\s+([a-z]\w*\s+\w+\[[^;(){}&=]+\];)", "${1}static threadgroup $2"),
        (r"(?m)^(\s*)threadgroup\s+([A-Z]\w*\s+\w+\[[^;(){}&=]+\];)", "${1}static $2"),
        (r"\b((?:float|half|int|uint|short|ushort|char|uchar|long|ulong)[234])\s*\(", "msl::make<$1>("),
        (r"struct bf16 \{ ushort bits; \};", "enum class bf16 : ushort {};"),
        (r"uint\(x\.bits\)", "uint(x)"),
        (r"y\.bits = (.*);", "y = bf16($1);"),
    ];
    let replace =
        |text: String, (from, to): (&str, &str)| Regex::new(from).unwrap().replace_all(&text, to).into_owned();
    replaced.into_iter().fold(text.to_string(), replace)
}

/// What clang says of a file with this text.
fn check(file: &str, text: &str) -> Result<(), String> {
    let include = root().join("tests/msl/strict");
    let mut child = Command::new(clang().expect("asked before"))
        .args(["-x", "c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-ferror-limit=5"])
        .args(["-Wno-unused-parameter", "-Wno-unused-function", "-Wno-unused-const-variable", "-Wno-psabi"])
        .args(["-Wno-unknown-attributes", "-Wno-unknown-pragmas", "-Wno-duplicate-decl-specifier"])
        .args(["-Wno-undefined-inline", "-Wno-undefined-internal", "-D__METAL_VERSION__=300", "-I"])
        .args([include.as_os_str(), "-".as_ref()])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "#line 1 \"prelude.metal\"\n{}", prepared(&source("prelude"))).unwrap();
    writeln!(input, "#line 1 \"{file}.metal\"\n{}", prepared(text)).unwrap();
    drop(input);
    let done = child.wait_with_output().unwrap();
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).into_owned()) }
}

#[test]
fn address_spaces_and_overloads_are_metals() {
    if !available() {
        return;
    }
    let wrong: Vec<String> = files().into_iter().filter_map(|file| check(file, &source(file)).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn mixed_address_spaces_are_noticed() {
    if !available() {
        return;
    }
    for (file, from, to) in [
        ("skinny", "struct Pack { device const uchar* row", "struct Pack { const uchar* row"),
        (
            "attention",
            "threadgroup const float* tile, threadgroup float* scores",
            "device const float* tile, threadgroup float* scores",
        ),
        ("rms_norm", "device const T* from = x", "T* from = x"),
        ("noise", "threadgroup float* shared, Place place", "float* shared, Place place"),
    ] {
        let text = source(file);
        assert!(text.contains(from), "{file}.metal has no `{from}`");
        assert!(check(file, &text.replacen(from, to, 1)).is_err(), "{file}: {to}");
    }
}
