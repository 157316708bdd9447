//! The configuration of the fake CUDA driver: environment variables, which are read once, at the first function lookup.
//!
//! | variable | effect |
//! |---|---|
//! | `WHOLEMEM_FAKE_CUDA_DEVICES=n` | the number of GPUs, by default two; with zero, `cuInit` returns `NO_DEVICE` |
//! | `WHOLEMEM_FAKE_CUDA_NUMA_NODES=0,1` | the NUMA node of each GPU, by default 0; -1 if a GPU has none |
//! | `WHOLEMEM_FAKE_CUDA_VERSION=12020` | the driver's version, by default 13.0; newer functions and PTX are unknown |
//! | `WHOLEMEM_FAKE_CUDA_MISSING=a,b` | functions that the driver lacks |
//! | `WHOLEMEM_FAKE_CUDA_NO_LOADER=1` | every function is missing |
//! | `WHOLEMEM_FAKE_CUDA_SKIP_KERNELS=1` | launches of gathers, scatters and collectives succeed, and do nothing |
//! | `WHOLEMEM_FAKE_CUDA_FAIL_CALL=n` | the nth call, counted from 1, fails, once |
//! | `WHOLEMEM_FAKE_CUDA_FAIL_CODE=987` | the result code of that call, by default 987 |
//!
//! A running process selects further calls to fail through [`crate::control`].

use std::env;
use std::sync::LazyLock;

/// The settings of the fake driver from environment variables.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    pub(crate) numa_nodes: Vec<i32>,
    pub(crate) version: i32,
    pub(crate) missing: Vec<String>,
    pub(crate) no_loader: bool,
    pub(crate) skip_kernels: bool,
    pub(crate) fail_call: u64,
    pub(crate) fail_code: u32,
}

pub(crate) fn get() -> &'static Config {
    static CONFIG: LazyLock<Config> = LazyLock::new(|| Config {
        devices: number("DEVICES", 2),
        numa_nodes: text("NUMA_NODES").split(',').filter_map(|node| node.parse().ok()).collect(),
        version: number("VERSION", 13_000),
        missing: text("MISSING").split(',').map(str::to_owned).collect(),
        no_loader: number("NO_LOADER", 0) != 0,
        skip_kernels: number("SKIP_KERNELS", 0) != 0,
        fail_call: number("FAIL_CALL", 0),
        fail_code: number("FAIL_CODE", 987),
    });
    &CONFIG
}

fn text(name: &str) -> String {
    env::var(format!("WHOLEMEM_FAKE_CUDA_{name}")).unwrap_or_default()
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    text(name).parse().unwrap_or(default)
}
