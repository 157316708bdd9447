//! The GPUs that are visible to this process, and their primary contexts.
//!
//! There is one table per process. A GPU's primary context, which all CUDA users of the process share, is retained at
//! the first call that needs it and never released: a release before the process exits has no benefit and could destroy
//! running work.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::sync::{Mutex, OnceLock, PoisonError};

use wholemem_os::ForkEpoch;

use super::bindings::*;
use super::code::{implausible, invalid_value};
use super::driver::Driver;
use crate::{BackendError, DeviceId, DeviceInfo};

/// All GPUs that are visible to this process.
#[derive(Debug)]
pub(crate) struct Gpus {
    driver: &'static Driver,
    ordinals: Vec<CUdevice>,
    infos: Vec<DeviceInfo>,
    /// The process that initialized the CUDA driver, which does not work in forked children.
    epoch: ForkEpoch,
    /// The retained primary contexts, by device number.
    contexts: Vec<Mutex<Option<Context>>>,
}

const FORKED: &str =
    "the process was forked after CUDA was initialized; start a new program instead of forking";

/// A CUDA primary context that is retained until the process exits.
#[derive(Debug, Clone, Copy)]
struct Context(CUcontext);

// SAFETY: a CUDA context may be current on any thread, and on several threads at once.
unsafe impl Send for Context {}

/// A CUDA context that is current on this thread until this value is dropped; then the previous context is current
/// again.
#[derive(Debug)]
pub(super) struct CurrentContext {
    driver: &'static Driver,
    // `CurrentContext` is not `Send`, since the context must be popped on the thread that pushed it.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is writable, and this context is on top of the stack, since every push is undone in its
        // own scope.
        if let Err(cause) = unsafe { (self.driver.cuCtxPopCurrent)(&raw mut popped) }.ok("cuCtxPopCurrent") {
            tracing::warn!(%cause, "cannot restore the caller's context");
        }
    }
}

impl Gpus {
    /// Returns the GPUs of this process, which the first call enumerates, or the reason why there are none.
    pub(crate) fn of_process() -> Result<&'static Self, String> {
        static GPUS: OnceLock<Result<Gpus, String>> = OnceLock::new();
        let gpus = GPUS.get_or_init(Self::enumerate).as_ref().map_err(Clone::clone)?;
        if gpus.epoch.is_current() { Ok(gpus) } else { Err(FORKED.to_owned()) }
    }

    fn enumerate() -> Result<Self, String> {
        let driver = Driver::of_process().map_err(Clone::clone)?;
        let failed = |cause: BackendError| cause.explained();
        let mut count = 0;
        // SAFETY: the driver call writes only `count`, which is writable.
        unsafe { (driver.cuDeviceGetCount)(&raw mut count) }.ok("cuDeviceGetCount").map_err(failed)?;
        if count == 0 {
            return Err("no GPU is visible to this process".to_owned());
        }
        let ordinals = (0..count).map(|index| ordinal(driver, index)).collect::<Result<Vec<_>, _>>();
        let ordinals = ordinals.map_err(failed)?;
        let infos = (0..).zip(&ordinals).map(|(id, &device)| info(driver, id, device));
        let infos = infos.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let contexts = ordinals.iter().map(|_| Mutex::default()).collect();
        let epoch = ForkEpoch::current().map_err(|error| error.to_string())?;
        Ok(Self { driver, ordinals, infos, epoch, contexts })
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(super) fn infos(&self) -> &[DeviceInfo] {
        &self.infos
    }

    /// Returns the driver's ordinal of a device.
    pub(super) fn ordinal(&self, device: DeviceId) -> CUdevice {
        self.ordinals[device.0 as usize]
    }

    /// Returns the device with the given ordinal of the driver.
    pub(super) fn device_of(&self, ordinal: CUdevice) -> Option<DeviceId> {
        let index = self.ordinals.iter().position(|&known| known == ordinal)?;
        Some(DeviceId(u32::try_from(index).expect("the driver counts GPUs in an `int`")))
    }

    /// Makes the primary context of a device current on this thread.
    pub(super) fn enter(&self, device: DeviceId) -> Result<CurrentContext, BackendError> {
        let Context(context) = self.context(device)?;
        // SAFETY: `context` is retained until the process exits.
        unsafe { (self.driver.cuCtxPushCurrent)(context) }.ok("cuCtxPushCurrent")?;
        Ok(CurrentContext { driver: self.driver, _this_thread: PhantomData })
    }

    fn context(&self, device: DeviceId) -> Result<Context, BackendError> {
        let mut slot = self.contexts[device.0 as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = *slot {
            return Ok(context);
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is writable, and the ordinal is valid.
        unsafe { (self.driver.cuDevicePrimaryCtxRetain)(&raw mut context, self.ordinal(device)) }
            .ok("cuDevicePrimaryCtxRetain")?;
        Ok(*slot.insert(Context(context)))
    }

    /// Returns an attribute of a device.
    pub(super) fn attribute(
        &self,
        device: DeviceId,
        which: CUdevice_attribute,
    ) -> Result<c_int, BackendError> {
        attribute(self.driver, self.ordinal(device), which)
    }
}

fn attribute(driver: &Driver, device: CUdevice, which: CUdevice_attribute) -> Result<c_int, BackendError> {
    let mut value = 0;
    // SAFETY: `value` is writable; for an unknown attribute the driver returns an error.
    unsafe { (driver.cuDeviceGetAttribute)(&raw mut value, which, device) }.ok("cuDeviceGetAttribute")?;
    Ok(value)
}

fn ordinal(driver: &Driver, index: c_int) -> Result<CUdevice, BackendError> {
    let mut device = 0;
    // SAFETY: the driver call writes only `device`, which is writable.
    unsafe { (driver.cuDeviceGet)(&raw mut device, index) }.ok("cuDeviceGet")?;
    Ok(device)
}

fn info(driver: &Driver, id: u32, device: CUdevice) -> Result<DeviceInfo, BackendError> {
    let mut name = [0_u8; 256];
    // SAFETY: `name` has more than the 255 bytes that the driver may write.
    unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast::<c_char>(), 255, device) }
        .ok("cuDeviceGetName")?;
    let name = CStr::from_bytes_until_nul(&name).expect("the driver writes at most 255 of 256 zeroed bytes");
    let name = name.to_string_lossy();
    let mut memory_len = 0;
    // SAFETY: the driver call writes only `memory_len`, which is writable.
    unsafe { (driver.cuDeviceTotalMem)(&raw mut memory_len, device) }.ok("cuDeviceTotalMem")?;
    let mut uuid = CUuuid_st { bytes: [0; 16] };
    // SAFETY: the driver call writes only `uuid`, which is writable.
    unsafe { (driver.cuDeviceGetUuid)(&raw mut uuid, device) }.ok("cuDeviceGetUuid")?;
    let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
    let part = |which| {
        u32::try_from(attribute(driver, device, which)?).map_err(|_| implausible("cuDeviceGetAttribute"))
    };
    let compute = part(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
        + part(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let numa_node = numa_node(driver, device)?;
    Ok(DeviceInfo { id: DeviceId(id), name: name.into_owned(), memory_len, uuid, compute, numa_node })
}

/// Returns the NUMA node that is nearest to a device; `None` if the machine has no NUMA nodes, or the driver does not know the
/// attribute, which CUDA 12.2 introduced.
fn numa_node(driver: &Driver, device: CUdevice) -> Result<Option<u32>, BackendError> {
    match attribute(driver, device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID) {
        Ok(node) => Ok(u32::try_from(node).ok()),
        Err(cause) if cause == invalid_value("cuDeviceGetAttribute") => Ok(None),
        Err(cause) => Err(cause),
    }
}
