//! Metal on a Mac: dispatches go into one serial encoder of the open command buffer, and tensors lie in memory that CPU and GPU
//! share. Written against Apple's documents and type-checked; nobody has run it yet (docs/guides/mac.md).
//!
//! A serial encoder runs its dispatches one after the other, and buffers are tracked, so no barrier or fence of ours is needed.
//! The process has one device: once `start` has succeeded, every tensor that `storage` makes lies in its memory.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{DType, MetalDevice, MetalStorage, Storage, Tensor};
use candle_metal_kernels::metal::{Buffer, ConstantValues, Value};
use candle_metal_kernels::source::Source;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSRange, NSString};
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState, MTLDevice, MTLDispatchType, MTLGPUFamily,
    MTLLanguageVersion, MTLLibrary, MTLMathFloatingPointFunctions, MTLMathMode, MTLResidencySet,
    MTLResidencySetDescriptor, MTLResourceOptions, MTLSize,
};
use parking_lot::Mutex;

use super::{Arg, Dispatch, Gpu, Kernel, Matrix, Product};
use crate::error::{Error, Result};

type Queue = Retained<ProtocolObject<dyn MTLCommandQueue>>;
type Commands = Retained<ProtocolObject<dyn MTLCommandBuffer>>;
type Encoder = Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>;
type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;
type Library = Retained<ProtocolObject<dyn MTLLibrary>>;
type ResidencySet = Retained<ProtocolObject<dyn MTLResidencySet>>;

/// A command buffer takes so many dispatches at most, and products of so many operations each: the system
/// stops one that keeps the GPU from the screen for seconds.
const MOST_DISPATCHES: usize = 512;
const MOST_OPERATIONS: f64 = 1e11;

pub struct Metal {
    device: MetalDevice,
    queue: Queue,
    libraries: Mutex<HashMap<&'static str, Library>>,
    pipelines: Mutex<HashMap<String, Pipeline>>,
    work: Mutex<Work>,
    /// What a tensor is left with whose memory is taken out: one byte, which holds no element.
    empty: Arc<Buffer>,
}

/// The command buffers that are not known to be done.
#[derive(Default)]
struct Work {
    /// The one that takes dispatches.
    open: Option<Open>,
    /// Those sent off, the oldest first, by number.
    sent: VecDeque<(u64, Commands)>,
    /// How many were sent off.
    commits: u64,
    resident: Option<ResidencySet>,
}

/// A command buffer with its one encoder.
struct Open {
    commands: Commands,
    encoder: Encoder,
    dispatches: usize,
    /// Of its products.
    operations: f64,
}

// SAFETY: command buffers, encoders and residency sets may be used from any thread, by one at a time; they are only reached
// through `Metal::work`, a mutex.
unsafe impl Send for Work {}

/// Why there is no Metal here; `None` if there is.
pub fn missing() -> Option<String> {
    // candle's device would panic in both cases.
    if candle_metal_kernels::metal::Device::all().is_empty() {
        return Some("this session has no Metal device".into());
    }
    if !objc2::available!(macos = 15.0) {
        return Some("Metal is used from macOS 15 on".into());
    }
    // Sums over simdgroups and their matrices; Intel's and AMD's GPUs and virtual machines lack them.
    let device = candle_metal_kernels::metal::Device::all().swap_remove(0);
    let able = device.as_ref().supportsFamily(MTLGPUFamily::Apple7);
    (!able).then(|| format!("{} is no GPU of an M1 or later", device.as_ref().name()))
}

static HOME: OnceLock<Arc<Metal>> = OnceLock::new();

/// The device of this process, if it was started.
pub fn home() -> Option<&'static Arc<Metal>> {
    HOME.get()
}

/// Starts the device of this process, once.
pub fn start() -> Result<Arc<Metal>> {
    if let Some(metal) = HOME.get() {
        return Ok(Arc::clone(metal));
    }
    if let Some(reason) = missing() {
        return Err(Error::failed(reason).with_hint("use --device cpu"));
    }
    let device = MetalDevice::new(0)?;
    let raw = device.metal_device().as_ref();
    let queue = raw.newCommandQueue().ok_or_else(|| Error::failed("the GPU gives no command queue"))?;
    let empty = Arc::new(buffer(raw, 1)?);
    let metal = Arc::new(Metal {
        empty,
        queue,
        libraries: Mutex::default(),
        pipelines: Mutex::default(),
        work: Mutex::default(),
        device,
    });
    Ok(Arc::clone(HOME.get_or_init(|| metal)))
}

fn gpu_error(what: &str, error: &NSError) -> Error {
    let text = error.localizedDescription().to_string();
    let slow = ["Timeout", "Impacting Interactivity"].iter().any(|sign| text.contains(sign));
    let error = Error::failed(format!("{what}: {text} ({} {})", error.domain(), error.code()));
    if slow {
        error.with_hint("it kept the screen waiting: use a smaller --batch or --context, or --device cpu")
    } else {
        error
    }
}

/// Infinities and NaN mean what they say, and functions are precise.
fn safe_maths() -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    options.setMathMode(MTLMathMode::Safe);
    options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    // Later versions have more names that ours could meet.
    options.setLanguageVersion(MTLLanguageVersion::Version3_0);
    options
}

impl Metal {
    fn raw(&self) -> &ProtocolObject<dyn MTLDevice> {
        self.device.metal_device().as_ref()
    }

    fn library(&self, file: &'static str) -> Result<Library> {
        let mut libraries = self.libraries.lock();
        if let Some(library) = libraries.get(file) {
            return Ok(library.clone());
        }
        let text = super::sources::text(file);
        let made = self.raw().newLibraryWithSource_options_error(&NSString::from_str(&text), Some(&safe_maths()));
        let library = made.map_err(|e| gpu_error(&format!("compiling {file}.metal"), &e))?;
        libraries.insert(file, library.clone());
        Ok(library)
    }

    /// The pipeline of a kernel's function, compiled at the first call.
    fn pipeline(&self, kernel: &'static Kernel, function: &str) -> Result<Pipeline> {
        if let Some(pipeline) = self.pipelines.lock().get(function) {
            return Ok(pipeline.clone());
        }
        let library = self.library(kernel.file)?;
        let found = library.newFunctionWithName(&NSString::from_str(function));
        let found = found.ok_or_else(|| Error::failed(format!("{}.metal has no kernel `{function}`", kernel.file)))?;
        let made = self.raw().newComputePipelineStateWithFunction_error(&found);
        let pipeline: Pipeline = made.map_err(|e| gpu_error(function, &e))?;
        if kernel.threads > pipeline.maxTotalThreadsPerThreadgroup() || pipeline.threadExecutionWidth() != 32 {
            let found = format!(
                "{} in simdgroups of {}",
                pipeline.maxTotalThreadsPerThreadgroup(),
                pipeline.threadExecutionWidth()
            );
            return Err(Error::op(kernel.name, format!("{} threads in simdgroups of 32", kernel.threads), found));
        }
        self.pipelines.lock().insert(function.to_string(), pipeline.clone());
        Ok(pipeline)
    }

    /// Hands the open encoder, made if there is none, to `encode`, which encodes one dispatch of so many operations.
    fn encode(&self, operations: f64, encode: impl FnOnce(&Encoder)) -> Result<()> {
        let mut work = self.work.lock();
        if work.open.is_none() {
            let none = || Error::failed("the GPU gives no command buffer");
            let commands = self.queue.commandBuffer().ok_or_else(none)?;
            let encoder = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Serial).ok_or_else(none)?;
            work.open = Some(Open { commands, encoder, dispatches: 0, operations: 0.0 });
        }
        let open = work.open.as_mut().expect("made above");
        encode(&open.encoder);
        open.dispatches += 1;
        open.operations += operations;
        if open.dispatches >= MOST_DISPATCHES || open.operations >= MOST_OPERATIONS {
            send(&mut work);
        }
        Ok(())
    }

    /// candle's product (MLX's gemm) of one tile shape, into our encoder. It checks all edges.
    fn encode_product(&self, product: &Product) -> Result<()> {
        const TILE: usize = 64;
        let Product { a, b, c } = product;
        let (m, n, k) = (a.rows, b.columns, a.columns);
        let letter = |m: &Matrix| if m.transposed { 't' } else { 'n' };
        let name = format!("gemm_{}{}_f32_f32_64_64_16_2_2", letter(a), letter(b));
        let aligned = |x: usize, tile: usize| Value::Bool(x.is_multiple_of(tile));
        let constants = ConstantValues::new(vec![
            (10, Value::Bool(false)),
            (100, Value::Bool(false)),
            (110, Value::Bool(false)),
            (200, aligned(m, TILE)),
            (201, aligned(n, TILE)),
            (202, aligned(k, 16)),
            (300, Value::Bool(false)),
        ]);
        let (device, kernels) = (self.device.metal_device(), self.device.kernels());
        let made = kernels.load_pipeline_with_constants(device, Source::Gemm, name, Some(constants));
        let pipeline = made.map_err(|e| Error::failed(format!("candle's product: {e:?}")))?;
        let lead = |m: &Matrix| if m.transposed { m.rows } else { m.columns } as i32;
        let size = |x: usize| i32::try_from(x).map_err(|_| Error::op("multiply", "sizes below 2^31", x.to_string()));
        let numbers = GemmNumbers {
            m: size(m)?,
            n: size(n)?,
            k: size(k)?,
            lda: lead(a),
            ldb: lead(b),
            ldd: size(n)?,
            tiles_n: size(n.div_ceil(TILE))?,
            tiles_m: size(m.div_ceil(TILE))?,
            batch_stride: [0; 3],
            swizzle_log: 0,
            k_iterations_aligned: size(k / 16)?,
            batch_ndim: 1,
        };
        let bound = [(0, bind("multiply", &a.arg)?), (1, bind("multiply", &b.arg)?), (3, bind("multiply", c)?)];
        self.encode(2.0 * m as f64 * n as f64 * k as f64, |encoder| {
            encoder.setComputePipelineState(pipeline.as_ref());
            for (index, (buffer, offset)) in &bound {
                // SAFETY: the buffer holds the matrix from that offset on (`Matrix` lies within its tensor).
                unsafe { encoder.setBuffer_offset_atIndex(Some(buffer.as_ref()), *offset, *index) };
            }
            // SAFETY: the structs have the layout that candle's kernel declares at these indices.
            unsafe {
                set_bytes(encoder, 4, std::slice::from_ref(&numbers));
                set_bytes(encoder, 6, &[1i32]);
                set_bytes(encoder, 7, &numbers.batch_stride);
            }
            let groups = MTLSize { width: n.div_ceil(TILE), height: m.div_ceil(TILE), depth: 1 };
            let threads = MTLSize { width: 32, height: 2, depth: 2 };
            encoder.dispatchThreadgroups_threadsPerThreadgroup(groups, threads);
        })
    }

    /// A new tensor's memory, shared by CPU and GPU, its contents unspecified.
    pub fn storage(&self, dtype: DType, count: usize) -> Result<MetalStorage> {
        let memory = match count * dtype.size_in_bytes() {
            0 => Arc::clone(&self.empty),
            bytes => Arc::new(buffer(self.raw(), bytes)?),
        };
        Ok(MetalStorage::new(memory, self.device.clone(), count, dtype))
    }
}

/// What candle's gemm declares at index 4.
#[repr(C)]
struct GemmNumbers {
    m: i32,
    n: i32,
    k: i32,
    lda: i32,
    ldb: i32,
    ldd: i32,
    tiles_n: i32,
    tiles_m: i32,
    batch_stride: [u64; 3],
    swizzle_log: i32,
    k_iterations_aligned: i32,
    batch_ndim: i32,
}

/// # Safety
/// The kernel declares what `values` are at that index.
unsafe fn set_bytes<T>(encoder: &Encoder, index: usize, values: &[T]) {
    let bytes = NonNull::from(values).cast::<c_void>();
    // SAFETY: Metal copies so many bytes during the call.
    unsafe { encoder.setBytes_length_atIndex(bytes, size_of_val(values), index) };
}

/// The buffer of an argument, and where in it the kernel begins, in bytes.
fn bind(op: &'static str, arg: &Arg) -> Result<(Buffer, usize)> {
    let (storage, layout) = arg.tensor.storage_and_layout();
    let Storage::Metal(metal) = &*storage else {
        return Err(Error::op(
            op,
            "a tensor of the GPU (there may be no memory left for one)",
            format!("{:?}", arg.tensor.device().location()),
        ));
    };
    let first = layout.start_offset() + arg.offset;
    if !layout.is_contiguous() || memory(metal).1 < (first + arg.len()) * metal.dtype().size_in_bytes() {
        return Err(Error::op(op, "a live, contiguous tensor", format!("{layout:?}, element {first}")));
    }
    Ok((metal.buffer().clone(), first * metal.dtype().size_in_bytes()))
}

/// Where the elements of a shared buffer lie, and how many bytes they are.
pub fn memory(storage: &MetalStorage) -> (*mut u8, usize) {
    let buffer: &ProtocolObject<dyn MTLBuffer> = storage.buffer().as_ref();
    (buffer.contents().cast::<u8>().as_ptr(), buffer.length())
}

/// Memory that CPU and GPU share, tracked by Metal.
fn buffer(device: &ProtocolObject<dyn MTLDevice>, bytes: usize) -> Result<Buffer> {
    let made = device.newBufferWithLength_options(bytes, MTLResourceOptions::StorageModeShared);
    Ok(Buffer::new(made.ok_or_else(|| Error::failed(format!("the GPU has no {bytes} bytes left")))?))
}

/// Ends and commits the open command buffer, if there is one, and forgets those that are done.
fn send(work: &mut Work) {
    let is_done = |(_, sent): &(u64, Commands)| sent.status() == MTLCommandBufferStatus::Completed;
    while work.sent.front().is_some_and(is_done) {
        work.sent.pop_front();
    }
    if let Some(Open { commands, encoder, .. }) = work.open.take() {
        encoder.endEncoding();
        commands.commit();
        work.commits += 1;
        work.sent.push_back((work.commits, commands));
    }
}

impl Drop for Metal {
    fn drop(&mut self) {
        // An encoder that is never ended aborts the process.
        send(&mut self.work.lock());
    }
}

impl Gpu for Metal {
    fn name(&self) -> &'static str {
        "metal"
    }

    fn description(&self) -> String {
        let raw = self.raw();
        format!("{}, working set {} MiB", raw.name(), raw.recommendedMaxWorkingSetSize() >> 20)
    }

    fn dispatch(&self, dispatch: &Dispatch) -> Result<()> {
        let Dispatch { kernel, dtype, form, args, numbers, groups } = *dispatch;
        autoreleasepool(|_| {
            let pipeline = self.pipeline(kernel, &kernel.function(dtype, form))?;
            let bound = args.iter().map(|arg| bind(kernel.name, arg)).collect::<Result<Vec<_>>>()?;
            let raw =
                |(buffer, _): &(Buffer, usize)| std::ptr::from_ref::<ProtocolObject<dyn MTLBuffer>>(buffer.as_ref());
            let mut buffers: Vec<_> = bound.iter().map(raw).collect();
            let mut offsets: Vec<usize> = bound.iter().map(|(_, offset)| *offset).collect();
            let words: Vec<u32> = numbers.iter().map(|n| n.bits()).collect();
            self.encode(0.0, |encoder| {
                encoder.setComputePipelineState(&pipeline);
                let range = NSRange { location: 0, length: buffers.len() };
                // SAFETY: Metal reads as many pointers and offsets during the call as `range` says; `bound` keeps the buffers.
                unsafe {
                    let pointers = NonNull::new_unchecked(buffers.as_mut_ptr());
                    let offsets = NonNull::new_unchecked(offsets.as_mut_ptr());
                    encoder.setBuffers_offsets_withRange(pointers, offsets, range);
                }
                if !words.is_empty() {
                    // SAFETY: the kernel's struct has these 32-bit numbers in this order (tests/msl/signatures.rs).
                    unsafe { set_bytes(encoder, args.len(), &words) };
                }
                let [width, height, depth] = groups;
                let threads = MTLSize { width: kernel.threads, height: 1, depth: 1 };
                encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, threads);
            })
        })
    }

    fn prepare(&self, functions: &[(&'static Kernel, String)]) -> Result<()> {
        autoreleasepool(|_| functions.iter().try_for_each(|(kernel, name)| self.pipeline(kernel, name).map(drop)))
    }

    fn multiply(&self, product: &Product) -> Result<()> {
        if product.a.rows == 0 || product.b.columns == 0 {
            return Ok(());
        }
        autoreleasepool(|_| self.encode_product(product))
    }

    fn commit(&self) -> Result<u64> {
        autoreleasepool(|_| {
            let mut work = self.work.lock();
            send(&mut work);
            Ok(work.commits)
        })
    }

    fn wait_for(&self, commit: u64) -> Result<()> {
        autoreleasepool(|_| {
            let mut work = self.work.lock();
            while work.sent.front().is_some_and(|(number, _)| *number <= commit) {
                let Some((_, sent)) = work.sent.pop_front() else { break };
                sent.waitUntilCompleted();
                match (sent.status() == MTLCommandBufferStatus::Error, sent.error()) {
                    (false, _) => {}
                    (true, Some(error)) => return Err(gpu_error("the GPU stopped", &error)),
                    (true, None) => return Err(Error::failed("the GPU stopped and did not say why")),
                }
            }
            Ok(())
        })
    }

    fn keep_resident(&self, tensors: &[&Tensor]) -> Result<()> {
        let mut work = self.work.lock();
        let raw = self.raw();
        if work.resident.is_none() {
            let made = raw.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new());
            let set = made.map_err(|e| gpu_error("keeping weights in memory", &e))?;
            self.queue.addResidencySet(&set);
            work.resident = Some(set);
        }
        let set = work.resident.as_ref().expect("made above");
        for tensor in tensors {
            let (buffer, _) = bind("keep_resident", &Arg::read(tensor))?;
            let raw: &ProtocolObject<dyn MTLBuffer> = buffer.as_ref();
            let allocation: &ProtocolObject<dyn MTLAllocation> = ProtocolObject::from_ref(raw);
            set.addAllocation(allocation);
        }
        set.commit();
        set.requestResidency();
        Ok(())
    }
}
