//! Tests with missing, outdated and faulty CUDA drivers, and with invalid handles: each has its own error, with a
//! hint if there is a remedy.

use std::process::Command;

use wholemem_hal::{
    Allocation, AllocationSpec, Attempt, Backend, BackendError, BackendKind, Capability, CudaMallocBuffer,
    DeviceId, DriverCode, Error, HandleKind, KernelImage, Module, Rights, ShareHandle,
};
use wholemem_testkit::{FakeCuda, Ranks, cuda, in_forked_child, skipped, test_name};

const STEP: usize = 2 << 20;

const UNAVAILABLE: Option<&str> =
    Some("`wholemem doctor` lists the failed checks; the host backend works without a GPU");

/// Runs `body` in a separate process, on the fake CUDA driver with the given settings.
fn on_fake_driver(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if Ranks::is_rank() {
        return Ranks::of(1).run(test, |_| body());
    }
    let Some(fake) = FakeCuda::install() else { return };
    on_driver(&fake, test, settings, body);
}

/// Runs `body` in a separate process, on the driver library that `fake` has installed, with the given settings.
fn on_driver(fake: &FakeCuda, test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    let set = |ranks: Ranks, (name, value): &(&str, &str)| {
        ranks.env(format!("WHOLEMEM_FAKE_CUDA_{name}"), value.to_owned())
    };
    settings.iter().fold(fake.ranks(1), set).run(test, |_| body());
}

/// Returns the reason why the CUDA backend is unavailable.
fn reason() -> String {
    let error = Backend::open(BackendKind::Cuda).unwrap_err();
    assert_eq!(error.hint(), UNAVAILABLE);
    assert_eq!(
        Backend::open(BackendKind::Cuda).unwrap_err(),
        error,
        "a second attempt returns the same error"
    );
    let Error::Unavailable { backend: BackendKind::Cuda, reason } = error else { panic!("{error:?}") };
    reason
}

fn driver_error(call: &'static str, code: u32) -> BackendError {
    BackendError::Driver { call, code: DriverCode(code) }
}

#[test]
fn a_missing_library_is_reported() {
    let body = || match Backend::open(BackendKind::Cuda) {
        Ok(_) => skipped("this machine has a driver"),
        Err(_) => assert_eq!(
            reason(),
            "cannot load the NVIDIA driver \
             (libcuda.so.1: cannot open shared object file: No such file or directory)"
        ),
    };
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), |_| body());
    }
    on_driver(&FakeCuda::with_library(|_| {}), test_name!(), &[], body);
}

#[test]
fn an_invalid_library_is_reported() {
    let body = || {
        let reason = reason();
        assert!(reason.starts_with("cannot load the NVIDIA driver ("), "{reason}");
        assert!(reason.ends_with("libcuda.so.1: file too short)"), "{reason}");
    };
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), |_| body());
    }
    on_driver(
        &FakeCuda::with_library(|path| std::fs::write(path, "hello").unwrap()),
        test_name!(),
        &[],
        body,
    );
}

#[test]
fn a_library_without_cu_get_proc_address_is_reported() {
    let body = || assert_eq!(reason(), missing_function("cuGetProcAddress_v2"));
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), |_| body());
    }
    let mut compiled = false;
    let empty = FakeCuda::with_library(|path| {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(path);
        compiled = compiler.status().is_ok_and(|status| status.success());
    });
    if !compiled {
        return skipped("no C compiler is installed");
    }
    on_driver(&empty, test_name!(), &[], body);
}

fn missing_function(function: &str) -> String {
    format!("`libcuda.so.1` has no `{function}`: the driver is older than 550")
}

#[test]
fn a_library_whose_cu_get_proc_address_finds_nothing_is_reported() {
    on_fake_driver(test_name!(), &[("NO_LOADER", "1")], || assert_eq!(reason(), missing_function("cuInit")));
}

#[test]
fn a_missing_required_function_is_reported() {
    on_fake_driver(test_name!(), &[("MISSING", "cuMemCreate")], || {
        assert_eq!(reason(), missing_function("cuMemCreate"))
    });
}

#[test]
fn missing_optional_functions_disable_their_capability() {
    let missing = "cuMemGetHandleForAddressRange,cuMulticastCreate";
    on_fake_driver(test_name!(), &[("MISSING", missing)], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let refused = |capability, reason| Error::Unsupported { capability, device: device.label(), reason };
        let dma_buf = refused(Capability::DmaBuf, "the driver has no `cuMemGetHandleForAddressRange`");
        let map = device.allocate(STEP).unwrap().map(Rights::Read).unwrap();
        assert_eq!(map.dma_buf().unwrap_err(), dma_buf);
        assert_eq!(device.probe(Capability::DmaBuf).outcome, Err(dma_buf));
        let multicast = refused(Capability::Multicast, "the driver has no `cuMulticastCreate`");
        assert_eq!(device.probe(Capability::Multicast).outcome, Err(multicast));
        assert_eq!(device.probe(Capability::Create).outcome, Ok(()));
    });
}

#[test]
fn an_old_driver_is_reported() {
    on_fake_driver(test_name!(), &[("VERSION", "12020")], || {
        assert_eq!(
            reason(),
            "the driver supports CUDA 12.2, but 12.4 is required: install driver 550 or newer"
        );
    });
}

#[test]
fn a_driver_without_visible_gpus_is_reported() {
    on_fake_driver(test_name!(), &[("DEVICES", "0")], || {
        assert_eq!(
            reason(),
            "`cuInit` returned CUDA_ERROR_NO_DEVICE (100): `CUDA_VISIBLE_DEVICES` may hide the GPU from this \
             process"
        );
    });
}

#[test]
fn the_numa_node_of_each_gpu_is_reported() {
    on_fake_driver(test_name!(), &[("DEVICES", "3"), ("NUMA_NODES", "1,0,-1")], || {
        let backend = cuda::backend().unwrap();
        let nodes: Vec<_> = backend.devices().iter().map(|info| info.numa_node).collect();
        assert_eq!(nodes, [Some(1), Some(0), None]);
    });
}

#[test]
fn a_driver_without_the_attribute_of_the_numa_node_is_accepted() {
    // The last call asks for the NUMA node. A driver answers `INVALID_VALUE` if it does not know the attribute.
    let settings = [("DEVICES", "1"), ("FAIL_CALL", &*OPENING.len().to_string()), ("FAIL_CODE", "1")];
    on_fake_driver(test_name!(), &settings, || {
        assert_eq!(cuda::backend().unwrap().devices()[0].numa_node, None);
    });
}

#[test]
fn a_hidden_gpu_has_a_hint() {
    on_fake_driver(test_name!(), &[("DEVICES", "1")], || {
        let error = cuda::backend().unwrap().device(1).unwrap_err();
        let expected = Error::NoSuchDevice { backend: BackendKind::Cuda, device: DeviceId(1), count: 1 };
        assert_eq!(error, expected);
        assert_eq!(error.hint(), Some("`CUDA_VISIBLE_DEVICES` may hide GPUs from this process"));
    });
}

/// The driver calls that open the CUDA backend on a machine with one GPU.
const OPENING: [&str; 10] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem",
    "cuDeviceGetUuid",
    "cuDeviceGetAttribute",
    "cuDeviceGetAttribute",
    "cuDeviceGetAttribute",
];

#[test]
fn an_unknown_result_code_while_opening_is_reported() {
    for nth in 1..=OPENING.len() {
        on_fake_driver(test_name!(), &[("DEVICES", "1"), ("FAIL_CALL", &nth.to_string())], || {
            let nth: usize = std::env::var("WHOLEMEM_FAKE_CUDA_FAIL_CALL").unwrap().parse().unwrap();
            assert_eq!(reason(), format!("`{}` returned an unknown result code, 987", OPENING[nth - 1]));
        });
    }
}

#[test]
fn an_unknown_result_code_is_returned_unchanged() {
    let nth = (OPENING.len() + 3).to_string();
    on_fake_driver(test_name!(), &[("DEVICES", "1"), ("FAIL_CALL", &nth)], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        // Two driver calls that query the granularity come before `cuMemCreate`.
        let error = device.allocate(STEP).unwrap_err();
        let attempt = Attempt::Create { len: STEP, device: device.label() };
        assert_eq!(error, Error::Failed { attempt, cause: driver_error("cuMemCreate", 987) });
        assert_eq!((error.hint(), error.code()), (None, 106));
        let source = std::error::Error::source(&error).unwrap();
        assert_eq!(source.to_string(), "`cuMemCreate` returned an unknown result code, 987");
        assert!(device.allocate(STEP).is_ok(), "the next allocation succeeds");
    });
}

#[test]
fn out_of_gpu_memory_has_a_hint() {
    on_fake_driver(test_name!(), &[], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let len = 65 << 30;
        let error = device.allocate(len).unwrap_err();
        let attempt = Attempt::Create { len, device: device.label() };
        assert_eq!(error, Error::Failed { attempt, cause: driver_error("cuMemCreate", 2) });
        assert_eq!(error.hint(), Some("`nvidia-smi` lists the processes that use GPU memory"));
    });
}

#[test]
fn a_kernel_newer_than_the_driver_has_a_hint() {
    on_fake_driver(test_name!(), &[("VERSION", "12040")], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        for (ptx, code, hint) in [
            (".version 8.5\n", 222, Some("the kernel is newer than the driver; install driver 550 or newer")),
            ("not a kernel", 218, None),
        ] {
            // SAFETY: no kernel of the module is launched.
            let error =
                unsafe { Module::load(&device, &KernelImage { ptx: Some(ptx), host: &[] }) }.unwrap_err();
            let attempt = Attempt::LoadModule { device: device.label() };
            assert_eq!(error, Error::Failed { attempt, cause: driver_error("cuModuleLoadDataEx", code) });
            assert_eq!(error.hint(), hint);
        }
    });
}

#[test]
fn numbers_beyond_an_int_are_invalid_values() {
    on_fake_driver(test_name!(), &[], || {
        let backend = cuda::backend().unwrap();
        let device = backend.device(0).unwrap();
        let node = AllocationSpec { node: Some(1 << 31), ..AllocationSpec::new(&device, STEP) };
        let error = Allocation::create(&backend, &node).unwrap_err();
        assert_eq!(error, Error::Failed { attempt: Attempt::Inspect, cause: driver_error("cuMemCreate", 1) });

        // SAFETY: no kernel of the module is launched.
        let module =
            unsafe { Module::load(&device, &KernelImage { ptx: Some(cuda::TESTING_PTX), host: &[] }) };
        let function = module.unwrap().function("wait_then_set").unwrap();
        let error = function.occupancy(1 << 31, 0).unwrap_err();
        let cause = driver_error("cuOccupancyMaxActiveBlocksPerMultiprocessor", 1);
        assert_eq!(error, Error::Failed { attempt: Attempt::Launch { name: "wait_then_set" }, cause });
    });
}

#[test]
fn fabric_handles_without_a_fabric_are_rejected() {
    on_fake_driver(test_name!(), &[], || {
        let backend = cuda::backend().unwrap();
        let device = backend.device(0).unwrap();
        let error = Allocation::import(&device, ShareHandle::Fabric([0xA5; 64]), STEP).unwrap_err();
        let attempt = Attempt::Import { len: STEP, device: device.label() };
        let cause = driver_error("cuMemImportFromShareableHandle", 801);
        assert_eq!(error, Error::Failed { attempt, cause });
        assert_eq!(error.hint(), None);

        let fabric = AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(&device, STEP) };
        let error = Allocation::create(&backend, &fabric).unwrap_err();
        let attempt = Attempt::Create { len: STEP, device: device.label() };
        assert_eq!(error, Error::Failed { attempt, cause: driver_error("cuMemCreate", 800) });
        let hint = "fabric handles need the IMEX service and its channel in `/dev/nvidia-caps-imex-channels`";
        assert_eq!(error.hint(), Some(hint));
    });
}

#[test]
fn descriptors_and_tokens_that_are_not_memory_are_rejected() {
    on_fake_driver(test_name!(), &[], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        let error = Allocation::import(&device, ShareHandle::from(pipe), STEP).unwrap_err();
        let attempt = Attempt::Import { len: STEP, device: device.label() };
        let cause = driver_error("cuMemImportFromShareableHandle", 1);
        assert_eq!(error, Error::Failed { attempt, cause });

        let buffer = CudaMallocBuffer::create(&device, 4096).unwrap();
        let garbage = ShareHandle::CudaIpc { token: [1; 64], offset: 0 };
        for (handle, code) in [(garbage, 1), (buffer.export().unwrap(), 201)] {
            let error = CudaMallocBuffer::import(&device, &handle, 8).unwrap_err();
            let attempt = Attempt::ImportCudaIpc { len: 8, device: device.label() };
            assert_eq!(error, Error::Failed { attempt, cause: driver_error("cuIpcOpenMemHandle", code) });
        }
    });
}

#[test]
fn adopting_an_address_without_an_allocation_is_rejected() {
    on_fake_driver(test_name!(), &[], || {
        let device = cuda::backend().unwrap().device(0).unwrap();
        let malloced = CudaMallocBuffer::create(&device, STEP).unwrap();
        let error = Allocation::adopt(&device, malloced.address(), STEP).unwrap_err();
        assert!(matches!(error, Error::Unsupported { capability: Capability::ShareFd, .. }), "{error:?}");

        let own = [0_u8; 8];
        // The test also adopts the highest address, where the end of the range overflows.
        for address in [own.as_ptr().addr() as u64, u64::MAX] {
            let error = Allocation::adopt(&device, address, 8).unwrap_err();
            let attempt = Attempt::Adopt { len: 8, device: device.label() };
            assert_eq!(error, Error::Failed { attempt, cause: driver_error("cuMemGetAddressRange", 500) });
        }
    });
}

#[test]
fn a_forked_child_cannot_open_cuda() {
    on_fake_driver(test_name!(), &[], || {
        cuda::backend().unwrap();
        in_forked_child(|| {
            let error = Backend::open(BackendKind::Cuda).unwrap_err();
            let reason =
                "the process was forked after CUDA was initialized; start a new program instead of forking"
                    .to_owned();
            assert_eq!(error, Error::Unavailable { backend: BackendKind::Cuda, reason });
        });
    });
}
