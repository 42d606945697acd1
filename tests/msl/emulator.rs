//! A `Gpu` that runs kernel sources on the CPU: each file is translated to C++, compiled with clang once for its content, and
//! loaded. Dispatches happen when they are handed over.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::DType;
use gpt::error::{Error, Result};
use gpt::ops::ctx::Ctx;
use gpt::ops::gpu::{Access, Dispatch, Gpu, Product};
use gpt::ops::simd::Family;
use gpt::ops::storage;
use sha2::{Digest, Sha256};

use super::translate;

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The text of kernels/metal/<file>.metal.
pub fn source(file: &str) -> String {
    let path = root().join(format!("kernels/metal/{file}.metal"));
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A clang of version 16 or later: the one in $MSL_CXX, or what is installed.
pub fn clang() -> Option<&'static str> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let works = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    let found = FOUND.get_or_init(|| {
        let versions = (16..=22).rev().map(|v| format!("clang++-{v}"));
        std::env::var("MSL_CXX").ok().into_iter().chain(versions).find(works)
    });
    found.as_deref()
}

/// Whether kernels can run here; says so if not. In CI ($CI or $MSL_REQUIRED is set) that is a failure.
pub fn available() -> bool {
    let required = ["CI", "MSL_REQUIRED"].iter().any(|name| std::env::var_os(name).is_some());
    assert!(clang().is_some() || !required, "the emulator of Metal's language needs clang 16 or later");
    if clang().is_none() {
        eprintln!("skipped: no clang++-16 or later is installed (Debian: apt-get install clang-19)");
    }
    clang().is_some()
}

/// Writes `content` to `path` unless it is there; whole or not at all.
fn put(path: &Path, content: &[u8]) {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temporary, content).unwrap();
    std::fs::rename(&temporary, path).unwrap();
}

/// Compiles a source, with `flags` and further C++ files; `output` says what comes out. Errors are the compiler's.
pub fn compile(file: &str, text: &str, more: &[&str], flags: &[&str]) -> std::result::Result<PathBuf, String> {
    let emulator = root().join("tests/msl/emulator");
    let prelude = source("prelude");
    let cpp = format!(
        "#include <metal_stdlib>\n{}",
        translate::to_cpp(("prelude.metal", &prelude), (&format!("{file}.metal"), text))
    );
    let mut hash = Sha256::new();
    let shims = ["runtime.h", "runtime.cc", "metal_stdlib"].iter().chain(more).map(|name| emulator.join(name));
    shims.for_each(|path| hash.update(std::fs::read(path).unwrap()));
    hash.update(cpp.as_bytes());
    flags.iter().for_each(|flag| hash.update(flag.as_bytes()));
    let hash: String = hash.finalize().iter().take(10).map(|b| format!("{b:02x}")).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("msl");
    std::fs::create_dir_all(&folder).unwrap();
    let (cc, out) = (folder.join(format!("{file}-{hash}.cc")), folder.join(format!("{file}-{hash}.bin")));
    if out.exists() {
        return Ok(out);
    }
    put(&cc, cpp.as_bytes());
    let unfinished = out.with_extension(format!("{}.out", std::process::id()));
    let done = Command::new(clang().expect("asked before"))
        .args(["-std=c++17", "-O1", "-g1", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unused-parameter", "-Wno-unused-function", "-Wno-duplicate-decl-specifier", "-Wno-psabi"])
        .args(["-Wno-unused-const-variable", "-Wno-unknown-attributes", "-Wno-unknown-pragmas"])
        .args(flags)
        .arg("-I")
        .arg(&emulator)
        .args([&cc, &emulator.join("runtime.cc")])
        .args(more.iter().map(|name| emulator.join(name)))
        .arg("-o")
        .arg(&unfinished)
        .arg("-lpthread")
        .output()
        .unwrap();
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).into_owned());
    }
    std::fs::rename(&unfinished, &out).unwrap();
    Ok(out)
}

type DispatchFn = unsafe extern "C" fn(*const c_char, *const *mut c_void, *const c_uint, c_uint, c_uint) -> c_int;

struct Library(libloading::Library);

impl Library {
    fn load(file: &str, text: &str) -> Self {
        let path = compile(file, text, &[], &["-shared", "-fPIC"]).unwrap_or_else(|e| panic!("{file}.metal:\n{e}"));
        // SAFETY: a library of ours, without constructors.
        Self(unsafe { libloading::Library::new(path) }.unwrap())
    }
}

/// A buffer of a recorded dispatch: what it held before, and after if it is written.
#[derive(Clone)]
pub struct Recorded {
    pub before: Vec<u8>,
    pub after: Option<Vec<u8>>,
    pub offset: usize,
}

/// A dispatch that can be run again elsewhere.
#[derive(Clone)]
pub struct Record {
    pub function: String,
    pub file: &'static str,
    pub buffers: Vec<Recorded>,
    pub groups: [u32; 3],
    pub threads: u32,
}

#[derive(Default)]
pub struct Emulator {
    libraries: Mutex<HashMap<&'static str, Arc<Library>>>,
    /// The order in which runnable threads are picked.
    pub seed: u32,
    /// The dispatches so far, if they are kept.
    pub records: Option<Mutex<Vec<Record>>>,
}

impl Emulator {
    /// One that keeps its dispatches.
    pub fn recording() -> Self {
        Self { records: Some(Mutex::default()), ..Self::default() }
    }

    /// Runs a function over buffers at these addresses, the last of which holds its numbers.
    fn call(
        &self,
        file: &'static str,
        function: &str,
        pointers: &[*mut c_void],
        (groups, threads): ([u32; 3], u32),
    ) -> Result<()> {
        let (library, name) = (self.library(file), CString::new(function).unwrap());
        // SAFETY: the signature is the emulator's; the buffers live until the call returns.
        let result = unsafe {
            let call: libloading::Symbol<DispatchFn> = library.0.get(b"msl_dispatch").unwrap();
            call(name.as_ptr(), pointers.as_ptr(), groups.as_ptr(), threads, self.seed)
        };
        match result {
            0 => Ok(()),
            -2 => Err(Error::op("emulator", format!("a kernel `{function}`"), "none of that name")),
            _ => Err(Error::op("emulator", "barriers that all threads reach", format!("divergence in {function}"))),
        }
    }

    /// Runs a function over these buffers and offsets, with the grid of a record.
    pub fn run_bytes(
        &self,
        file: &'static str,
        function: &str,
        (buffers, offsets): (&mut [Vec<u8>], &[usize]),
        record: &Record,
    ) -> Result<()> {
        let places = buffers.iter_mut().zip(offsets);
        let pointers: Vec<*mut c_void> = places.map(|(b, o)| b.as_mut_ptr().wrapping_add(*o).cast()).collect();
        self.call(file, function, &pointers, (record.groups, record.threads))
    }

    fn library(&self, file: &'static str) -> Arc<Library> {
        let mut libraries = self.libraries.lock().unwrap_or_else(|e| e.into_inner());
        libraries.entry(file).or_insert_with(|| Arc::new(Library::load(file, &source(file)))).clone()
    }
}

impl Gpu for Emulator {
    fn name(&self) -> &'static str {
        "emulator"
    }

    fn dispatch(&self, dispatch: &Dispatch) -> Result<()> {
        let Dispatch { kernel, args, numbers, .. } = dispatch;
        let function = kernel.function(dispatch.dtype, dispatch.form);
        let mut open = Vec::new();
        for arg in *args {
            open.push(storage::open(kernel.name, arg.tensor, arg.access != Access::Read)?);
        }
        let places: Vec<(*mut u8, usize)> = open.iter_mut().map(|o| o.address()).collect();
        let offsets: Vec<usize> = args.iter().map(|a| a.offset * a.tensor.dtype().size_in_bytes()).collect();
        let mut words: Vec<u32> = numbers.iter().map(|n| n.bits()).collect();
        // SAFETY: the guards hold the memory.
        let content = |i: usize| unsafe { std::slice::from_raw_parts(places[i].0, places[i].1) }.to_vec();
        let before: Vec<Vec<u8>> =
            if self.records.is_some() { (0..args.len()).map(content).collect() } else { Vec::new() };
        let mut pointers: Vec<*mut c_void> = Vec::new();
        for ((place, offset), arg) in places.iter().zip(&offsets).zip(*args) {
            assert!(*offset <= place.1, "{function}: offset {} of {} bytes", arg.offset, place.1);
            pointers.push(place.0.wrapping_add(*offset).cast());
        }
        pointers.push(words.as_mut_ptr().cast());
        let groups = dispatch.groups.map(|n| n as u32);
        self.call(kernel.file, &function, &pointers, (groups, kernel.threads as u32))?;
        if let Some(records) = &self.records {
            let buffers = before.into_iter().enumerate().map(|(i, before)| {
                let after = (args[i].access != Access::Read).then(|| content(i));
                Recorded { before, after, offset: offsets[i] }
            });
            let mut buffers: Vec<Recorded> = buffers.collect();
            let words: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            buffers.push(Recorded { before: words, after: None, offset: 0 });
            let (file, threads) = (kernel.file, kernel.threads as u32);
            records.lock().unwrap().push(Record { function, file, buffers, groups, threads });
        }
        Ok(())
    }

    /// In plain loops: candle's products do this on a Mac.
    fn multiply(&self, product: &Product) -> Result<()> {
        let Product { a, b, c } = product;
        let (m, k, n) = (a.rows, a.columns, b.columns);
        assert_eq!((b.rows, a.arg.tensor.dtype()), (k, DType::F32));
        let (x, y) = (storage::read::<f32>("multiply", a.arg.tensor)?, storage::read::<f32>("multiply", b.arg.tensor)?);
        let mut to = storage::write::<f32>("multiply", c.tensor)?;
        let at = |m: &gpt::ops::gpu::Matrix, i: usize, j: usize| {
            m.arg.offset + if m.transposed { j * m.rows + i } else { i * m.columns + j }
        };
        for i in 0..m {
            for j in 0..n {
                let sum: f64 = (0..k).map(|l| f64::from(x[at(a, i, l)]) * f64::from(y[at(b, l, j)])).sum();
                to[c.offset + i * n + j] = sum as f32;
            }
        }
        Ok(())
    }
}

/// A context whose ops run in the emulator.
pub fn ctx() -> Ctx {
    Ctx::gpu(shared().clone(), Family::detect())
}

fn shared() -> &'static Arc<Emulator> {
    static SHARED: OnceLock<Arc<Emulator>> = OnceLock::new();
    SHARED.get_or_init(Arc::default)
}
