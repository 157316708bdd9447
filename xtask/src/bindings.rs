//! Generates the table of CUDA driver functions that the crate hal calls, with the type and version of each.
//!
//! bindgen reads NVIDIA's typedefs, which name each function's type by the version that introduced it (`PFN_cuMemCreate_v10020`).
//! The version that is requested from `cuGetProcAddress` is taken from that name, so that type and version always agree. Result
//! codes are open newtypes with a table of names, so that a code of a newer driver is a number and not undefined behaviour.

#[cfg(feature = "bindings")]
use std::fs;
use std::path::Path;

#[cfg(any(test, feature = "bindings"))]
use anyhow::Context;
use anyhow::Result;

use crate::generated;
use crate::wheels::RUNTIME;

/// The generated file with the table of CUDA driver functions.
const FILE: &str = "crates/hal/src/generated/bindings.rs";

/// The CUDA driver functions that every supported driver has: driver 550 (CUDA 12.4) and newer.
const REQUIRED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuMemGetInfo",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemRetainAllocationHandle",
    "cuMemGetAddressRange",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer",
    "cuPointerGetAttribute",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v2",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuGraphRetainUserObject",
    "cuUserObjectCreate",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
];

/// The CUDA driver functions that a driver may lack. If one is missing, its entry in the table is `None`.
const OPTIONAL: &[&str] =
    &["cuMemGetHandleForAddressRange", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"];

/// The CUDA driver function that resolves all other functions; the only symbol that is looked up by name in the library.
const LOADER: &str = "cuGetProcAddress";

/// A number that is part of the digest in the generated file. Increase it when the output of this generator changes.
const GENERATION: &str = "1";

/// Returns a digest of all inputs of the generated file.
fn inputs() -> String {
    let tools = [GENERATION, "bindgen 0.72.1", RUNTIME.name, RUNTIME.version];
    generated::digest(
        tools.iter().chain(REQUIRED).chain(&[LOADER, "optional"]).chain(OPTIONAL).map(|part| part.as_bytes()),
    )
}

/// Checks that the committed table of driver functions matches the digest of the lists in this module; if not, generates the
/// table and compares.
pub(crate) fn check() -> Result<()> {
    if generated::is_current(Path::new(FILE), &inputs()) { Ok(()) } else { generate(true) }
}

/// Runs xtask again with the feature `bindings`, which generates the table of CUDA driver functions.
#[cfg(not(feature = "bindings"))]
pub(crate) fn generate(check: bool) -> Result<()> {
    generated::run_generator("bindings", check)
}

/// Generates the file with the bindings and the table of CUDA driver functions.
#[cfg(feature = "bindings")]
pub(crate) fn generate(check: bool) -> Result<()> {
    let include = RUNTIME.folder()?.join("nvidia/cuda_runtime/include");
    let read = |name: &str| {
        let path = include.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let (typedefs, header) = (read("cudaTypedefs.h")?, read("cuda.h")?);
    let functions = functions(&typedefs)?;

    let clang = crate::wheels::LIBCLANG.folder()?.join("clang/native");
    let gcc = crate::command::capture(std::process::Command::new("gcc").arg("-print-file-name=include"))?;
    let types =
        functions.iter().map(|function_row| function_row.typedef.as_str()).collect::<Vec<_>>().join("|");
    let bindings = with_libclang(&clang, || {
        bindgen::Builder::default()
            .header(include.join("cudaTypedefs.h").display().to_string())
            .clang_args([format!("-I{}", include.display()), "-isystem".to_owned(), gcc.trim().to_owned()])
            .allowlist_type(types)
            .allowlist_type("CUdevice_attribute|CUpointer_attribute|CUctx_flags|CUstream_flags|CUevent_flags")
            .allowlist_type(
                "CUmemAllocationGranularity_flags|CUmemRangeHandleType|CUjit_option|CUipcMem_flags|CUuserObject_flags|CUuserObjectRetain_flags",
            )
            .allowlist_var("CU_MEMHOSTALLOC_(PORTABLE|DEVICEMAP)")
            .allowlist_var("CU_MEMHOSTREGISTER_(PORTABLE|DEVICEMAP|READ_ONLY)")
            .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
            .prepend_enum_name(false)
            .generate_comments(false)
            .generate()
    })?;
    let text = format!(
        "{}{bindings}{}{}",
        generated::label("//!", "bindings", &inputs()),
        table(&functions),
        names(&header)
    );
    generated::write_or_compare(Path::new(FILE), &text, check)
}

/// Runs `generate` in a process in which `LIBCLANG_PATH` names the pinned libclang for clang-sys.
#[cfg(feature = "bindings")]
fn with_libclang<T, E>(folder: &Path, generate: impl FnOnce() -> Result<T, E>) -> Result<T>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let folder = folder.canonicalize()?;
    if std::env::var_os("LIBCLANG_PATH").as_deref() != Some(folder.as_os_str()) {
        // Setting an environment variable of the running process is unsafe, so xtask starts itself again with the variable.
        let status = std::process::Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .env("LIBCLANG_PATH", &folder)
            .status()?;
        if status.success() {
            std::process::exit(0);
        }
        anyhow::bail!("the generator of the driver bindings failed: {status}");
    }
    Ok(generate()?)
}

/// A CUDA driver function: its name, the typedef of its type, and the version in the name of the typedef.
#[cfg(any(test, feature = "bindings"))]
#[derive(Debug, PartialEq, Eq)]
struct DriverFunction {
    function: &'static str,
    typedef: String,
    version: u32,
    required: bool,
}

#[cfg(feature = "bindings")]
fn functions(typedefs: &str) -> Result<Vec<DriverFunction>> {
    let listed = REQUIRED.iter().map(|name| (*name, true)).chain(OPTIONAL.iter().map(|name| (*name, false)));
    let listed = listed.chain([(LOADER, true)]);
    listed
        .map(|(listed, required)| {
            let version = version(typedefs, listed)?;
            let function = base_name(listed);
            Ok(DriverFunction { function, typedef: format!("PFN_{function}_v{version}"), version, required })
        })
        .collect()
}

/// Returns the name of a CUDA driver function without the suffix `_v2`. `cuGetProcAddress` selects the form of a function by
/// version, not by suffix.
#[cfg(any(test, feature = "bindings"))]
fn base_name(listed: &str) -> &str {
    listed.strip_suffix("_v2").unwrap_or(listed)
}

/// Returns the version of a CUDA driver function: the number in `#define PFN_f PFN_f_v10020`, or the first number in `#define
/// PFN_f __API_TYPEDEF_PTSZ(PFN_f, 4000, 7000)`; the second is the version for per-thread default streams.
#[cfg(any(test, feature = "bindings"))]
fn version(typedefs: &str, function: &str) -> Result<u32> {
    let definition = typedefs
        .lines()
        .find_map(|line| {
            let (name, definition) = line.strip_prefix("#define PFN_")?.split_once(char::is_whitespace)?;
            (name == function).then_some(definition.trim())
        })
        .with_context(|| format!("the headers define no `PFN_{function}`"))?;
    let number = match definition.strip_prefix("__API_TYPEDEF_") {
        Some(arguments) => arguments.split(',').nth(1).map(str::trim),
        None => definition.rsplit_once("_v").map(|(_, version)| version),
    };
    number
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("cannot read the version in `#define PFN_{function} {definition}`"))
}

/// Returns the source of a macro that passes all CUDA driver functions to another macro.
#[cfg(any(test, feature = "bindings"))]
fn table(functions: &[DriverFunction]) -> String {
    let mut text =
        "\n/// Every function of the table: how badly it is needed, its name, its type and its version.\n\
                    macro_rules! for_each_entry {\n    ($then:ident) => {\n        $then! {\n"
            .to_owned();
    for function_row in functions {
        let requirement = match function_row {
            DriverFunction { function, .. } if *function == LOADER => continue,
            DriverFunction { required: true, .. } => "required",
            DriverFunction { required: false, .. } => "optional",
        };
        text += &format!(
            "            {requirement} {}: {}, {};\n",
            function_row.function, function_row.typedef, function_row.version
        );
    }
    text + "        }\n    };\n}\npub(super) use for_each_entry;\n"
}

/// Returns the source of a table of the names of all CUDA result codes.
#[cfg(any(test, feature = "bindings"))]
fn names(header: &str) -> String {
    let mut text = "\n/// The names of the result codes that the pinned headers know.\n\
                    pub const RESULT_NAMES: &[(u32, &str)] = &[\n"
        .to_owned();
    for line in header.lines() {
        let Some((name, value)) = line.trim().split_once('=') else { continue };
        let (name, value) = (name.trim(), value.trim().trim_end_matches(','));
        let is_code = name == "CUDA_SUCCESS" || name.starts_with("CUDA_ERROR_");
        if let (true, Ok(code)) = (is_code, value.parse::<u32>()) {
            text += &format!("    ({code}, {name:?}),\n");
        }
    }
    text + "];\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_both_forms_of_definition() {
        let typedefs = "#define PFN_cuMemCreate  PFN_cuMemCreate_v10020\n\
                        #define PFN_cuMemCreateMore  PFN_cuMemCreateMore_v1\n\
                        #define PFN_cuMemcpyAsync  __API_TYPEDEF_PTSZ(PFN_cuMemcpyAsync, 4000, 7000)\n";
        assert_eq!(version(typedefs, "cuMemCreate").unwrap(), 10020);
        assert_eq!(version(typedefs, "cuMemcpyAsync").unwrap(), 4000);
        assert_eq!(base_name("cuMemcpyAsync_v2"), "cuMemcpyAsync");
        let error = version(typedefs, "cuMemFly").unwrap_err();
        assert_eq!(error.to_string(), "the headers define no `PFN_cuMemFly`");
    }

    #[test]
    fn result_codes_are_named_by_number() {
        let header = "    CUDA_SUCCESS                              = 0,\n    CUDA_ERROR_INVALID_VALUE = 1,\n  X = 3\n";
        assert!(
            names(header).contains("    (0, \"CUDA_SUCCESS\"),\n    (1, \"CUDA_ERROR_INVALID_VALUE\"),\n];")
        );
    }

    #[test]
    fn no_function_is_listed_twice() {
        let mut all: Vec<_> = REQUIRED.iter().chain(OPTIONAL).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn the_loader_is_not_in_the_table() {
        let function_row =
            |function, required| DriverFunction { function, typedef: "T".to_owned(), version: 1, required };
        let text = table(&[
            function_row("cuInit", true),
            function_row("cuMulticastCreate", false),
            function_row(LOADER, true),
        ]);
        assert!(
            text.contains("required cuInit: T, 1;\n            optional cuMulticastCreate: T, 1;\n        }"),
            "{text}"
        );
    }
}
