//! Compiles the kernels to PTX with pinned NVRTC, and assembles the PTX to check that no kernel spills registers.
//!
//! A build of wholemem needs no CUDA: a crate embeds the committed PTX of its folder `kernels/ptx/`, and the driver compiles it
//! when it is loaded. The PTX targets compute capability 7.0 and a PTX version that drivers from 550 on read. Kernels that are
//! faster with features of newer devices are also compiled for these devices, as `NAME.90.ptx`. Kernels with deliberate faults
//! for tests are `NAME.testing.ptx`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::wheels::{NVCC, NVRTC, RUNTIME};
use crate::{command, generated};

/// The folders with kernel sources, one in each crate that embeds PTX. The PTX is in the subfolder `ptx`.
const FOLDERS: &[&str] = &["crates/hal/kernels", "crates/testkit/kernels", "crates/wholemem/kernels"];

/// The folder of CUDA headers, which the kernel sources of every folder may include.
const HEADERS: &str = "crates/wholemem/kernels/include";

/// The compiler options of NVRTC.
const OPTIONS: &[&str] = &["--std=c++17", "--restrict", "--device-as-default-execution-space"];

/// The GPU architectures for which PTX is assembled if it supports them: the oldest supported one, and Hopper.
const ARCHITECTURES: &[u32] = &[OLDEST_COMPUTE, 90];

/// The compute capability that kernels are compiled for by default.
const OLDEST_COMPUTE: u32 = 70;

/// A PTX file that is compiled from a kernel source. The `Debug` text of this type is part of the digests in committed PTX, so
/// renaming a field changes all digests.
#[derive(Debug, Clone, Copy)]
struct Text {
    compute: u32,
    /// Text that is inserted before the file extension, such as `90.`.
    mark: &'static str,
    define: Option<&'static str>,
}

/// The PTX file that is compiled from every kernel source.
const DEFAULT: Text = Text { compute: OLDEST_COMPUTE, mark: "", define: None };

/// Additional PTX files that are compiled from some kernel sources.
const EXTRA: &[(&str, Text)] = &[
    ("collective", Text { compute: 90, mark: "90.", define: None }),
    ("collective", Text { compute: 90, mark: "testing.", define: Some("WHOLEMEM_TESTING") }),
];

/// Checks that the committed PTX matches the digest of its kernel sources; if not, or with `all`, compiles and compares.
pub(crate) fn check(all: bool) -> Result<()> {
    generate(true, all)
}

/// Compiles every kernel whose sources have changed, or all kernels with `all`. With `check`, compares the PTX instead of
/// writing it.
pub(crate) fn generate(check: bool, all: bool) -> Result<()> {
    let mut sources = Vec::new();
    for folder in FOLDERS {
        let found = sources_in(Path::new(folder))?;
        if found.is_empty() {
            bail!("the folder {folder} contains no kernel sources");
        }
        sources.extend(found);
    }
    for (source, text) in ptx_files_of(&sources) {
        let (target, digest) = (text.target(source), inputs(source)?);
        if generated::is_current(&target, &digest) && !all {
            continue;
        }
        let ptx = compile(source, text)?;
        assemble(&ptx, source, text)?;
        let text = format!("{}{ptx}", generated::label("//", "kernels", &digest));
        generated::write_or_compare(&target, &text, check)?;
    }
    reject_ptx_without_source(&sources)
}

/// Returns each kernel source with the PTX files that are compiled from it.
fn ptx_files_of(sources: &[PathBuf]) -> impl Iterator<Item = (&PathBuf, Text)> {
    sources.iter().flat_map(|source| {
        let extra = EXTRA.iter().filter(|(name, _)| source.file_stem().is_some_and(|stem| stem == *name));
        std::iter::once(DEFAULT).chain(extra.map(|(_, text)| *text)).map(move |text| (source, text))
    })
}

impl Text {
    /// Returns the path of the PTX file that is compiled from `source`.
    fn target(self, source: &Path) -> PathBuf {
        let name = source.file_name().unwrap_or_default();
        source.with_file_name("ptx").join(name).with_extension(format!("{}ptx", self.mark))
    }
}

fn sources_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut sources: Vec<_> =
        paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
    sources.sort();
    Ok(sources)
}

/// Returns an error if there is a PTX file without a kernel source, which a crate could embed by mistake.
fn reject_ptx_without_source(sources: &[PathBuf]) -> Result<()> {
    for folder in FOLDERS {
        for entry in fs::read_dir(Path::new(folder).join("ptx"))? {
            let path = entry?.path();
            if !ptx_files_of(sources).any(|(source, text)| text.target(source) == path) {
                bail!("no kernel source generates the PTX file {file}", file = path.display());
            }
        }
    }
    Ok(())
}

/// Returns a digest of all inputs of a kernel's PTX: the source, all headers, the tools and their options.
fn inputs(source: &Path) -> Result<String> {
    let mut parts = vec![
        fs::read(source)?,
        include_str!("nvrtc.py").into(),
        NVRTC.version.into(),
        RUNTIME.version.into(),
    ];
    parts.push(format!("{EXTRA:?}").into());
    parts.extend(ARCHITECTURES.iter().map(|architecture| architecture.to_le_bytes().to_vec()));
    parts.extend(OPTIONS.iter().map(|option| option.as_bytes().to_vec()));
    let mut headers = Vec::new();
    for folder in fs::read_dir(HEADERS).with_context(|| format!("cannot list {HEADERS}"))? {
        for file in fs::read_dir(folder?.path())? {
            headers.push(file?.path());
        }
    }
    headers.sort();
    for header in headers {
        parts.push(fs::read(header)?);
    }
    Ok(generated::digest(parts.iter().map(Vec::as_slice)))
}

fn compile(source: &Path, text: Text) -> Result<String> {
    let library = NVRTC.folder()?.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    let headers = RUNTIME.folder()?.join("nvidia/cuda_runtime/include");
    let mut python = Command::new("python3");
    python
        .args(["-c", include_str!("nvrtc.py")])
        .arg(library)
        .arg(source)
        .arg(format!("--gpu-architecture=compute_{}", text.compute))
        .args(text.define.map(|name| format!("-D{name}")))
        .args(OPTIONS)
        .args([format!("-I{}", headers.display()), format!("-I{HEADERS}")]);
    let ptx =
        command::capture(&mut python).with_context(|| format!("cannot compile {}", source.display()))?;
    Ok(without_asm_markers(&ptx))
}

/// Compiles a kernel of a user with NVRTC and only the options that it needs, and assembles its PTX for each GPU architecture.
pub(crate) fn check_user_kernel(source: &Path, headers: &Path) -> Result<()> {
    let library = NVRTC.folder()?.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    let mut python = Command::new("python3");
    python.args(["-c", include_str!("nvrtc.py")]).arg(library).arg(source);
    python.arg(format!("--gpu-architecture=compute_{OLDEST_COMPUTE}")).arg("--std=c++17");
    python.arg(format!("-I{}", headers.display()));
    let ptx =
        command::capture(&mut python).with_context(|| format!("cannot compile {}", source.display()))?;
    assemble(&ptx, source, DEFAULT)
}

/// Removes NVRTC's comments around inline assembly, which are a tenth of the PTX text.
fn without_asm_markers(ptx: &str) -> String {
    let is_marker = |line: &&str| matches!(line.trim(), "// begin inline asm" | "// end inline asm");
    ptx.lines().filter(|line| !is_marker(line)).fold(String::new(), |text, line| text + line + "\n")
}

/// Assembles PTX for each GPU architecture, and fails if a kernel spills registers.
fn assemble(ptx: &str, source: &Path, text: Text) -> Result<()> {
    let ptxas = NVCC.folder()?.join("nvidia/cuda_nvcc/bin/ptxas");
    let folder = Path::new("target/kernels");
    fs::create_dir_all(folder)?;
    let input = folder.join("kernel.ptx");
    fs::write(&input, ptx)?;
    for architecture in ARCHITECTURES.iter().filter(|architecture| **architecture >= text.compute) {
        let architecture = format!("sm_{architecture}");
        let output = Command::new(&ptxas)
            .args(["-v", "-arch", &architecture, "-o"])
            .arg(folder.join("kernel.cubin"))
            .arg(&input)
            .output()
            .context("cannot start ptxas")?;
        let log = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("ptxas rejects the PTX of {file} for {architecture}: {log}", file = source.display());
        }
        let spills: Vec<_> = log.lines().filter(|line| spills(line)).collect();
        if !spills.is_empty() {
            bail!(
                "kernels of {file} spill registers on {architecture}: {lines}",
                file = source.display(),
                lines = spills.join("; ")
            );
        }
        for line in log.lines().filter(|line| line.contains("registers")) {
            println!("{} {architecture}: {}", source.display(), line.trim_start_matches("ptxas info    : "));
        }
    }
    Ok(())
}

/// Returns true if a line of ptxas output reports spilled bytes.
fn spills(line: &str) -> bool {
    let counts = line.split(',').filter_map(|part| {
        let (count, kind) = part.trim().split_once(' ')?;
        kind.contains("spill").then(|| count.parse::<u32>().ok()).flatten()
    });
    counts.sum::<u32>() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inline_asm_markers_are_removed() {
        let ptx = "// Compiler\n\t// begin inline asm\n\tld.global.u8 %r1, [%rd1];\n\t// end inline asm\n";
        assert_eq!(without_asm_markers(ptx), "// Compiler\n\tld.global.u8 %r1, [%rd1];\n");
    }

    #[test]
    fn spilled_bytes_are_detected() {
        assert!(!spills("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"));
        assert!(!spills("    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"));
        assert!(spills("    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads"));
        assert!(spills("    0 bytes stack frame, 0 bytes spill stores, 12 bytes spill loads"));
    }
}
