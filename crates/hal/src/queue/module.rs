//! Modules: kernels that are loaded on a device and looked up by name.

use std::sync::Arc;

use crate::backend::{Operand, OwnedResource, Teardown};
use crate::raw::{RawFunction, RawModule};
use crate::{Attempt, Backend, Device, Error, KernelImage, Result};

/// A set of kernels loaded on a device.
#[derive(Debug, Clone)]
#[doc(alias = "CUmodule")]
pub struct Module {
    core: Arc<ModuleCore>,
}

#[derive(Debug)]
struct ModuleCore {
    owned: OwnedResource,
    device: Device,
    raw: RawModule,
}

impl Module {
    /// Loads a set of kernels on a device. Do so when the device is opened: some drivers block in this call until
    /// running kernels end.
    ///
    /// # Errors
    /// [`Error::Failed`] with the driver's error.
    ///
    /// # Safety
    /// The functions of the image have the parameters that later launches pass.
    pub unsafe fn load(device: &Device, image: &KernelImage) -> Result<Self> {
        let attempt = || Attempt::LoadModule { device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the device exists, the process is not a forked child, and the caller guarantees that the functions
        // of the image have the parameters that later launches pass.
        let raw = unsafe { backend.queue().load_module(device.id(), image) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        let owned = OwnedResource::new(backend, Teardown::UnloadModule(raw));
        Ok(Self { core: Arc::new(ModuleCore { owned, device: device.clone(), raw }) })
    }

    /// Looks up a kernel of the module by name.
    ///
    /// # Errors
    /// [`Error::NoSuchFunction`]; [`Error::Failed`].
    pub fn function(&self, name: &'static str) -> Result<Function> {
        let attempt = || Attempt::Launch { name };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the module is live, since `self` holds it.
        let raw = unsafe { backend.queue().function(self.core.raw, name) }
            .map_err(|cause| backend.to_error(self.core.device.id(), attempt(), cause))?;
        match raw {
            Some(raw) => Ok(Function { module: self.clone(), name, raw }),
            None => Err(Error::NoSuchFunction { name: name.to_owned(), backend: backend.kind() }),
        }
    }

    fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }
}

/// A kernel of a loaded module. It keeps the module loaded.
#[derive(Debug, Clone)]
#[doc(alias = "CUfunction")]
pub struct Function {
    module: Module,
    name: &'static str,
    raw: RawFunction,
}

impl Function {
    /// Returns the name of the kernel.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the device of the kernel.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.module.core.device
    }

    /// Returns the number of the kernel's blocks of `threads` threads that can be resident on the idle device at
    /// once. Blocks that wait for each other must not exceed this number.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn occupancy(&self, threads: u32, shared_len: u32) -> Result<u32> {
        let attempt = || Attempt::Launch { name: self.name };
        let backend = self.module.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the function is live, since `self` holds its module.
        unsafe { backend.queue().occupancy(self.raw, threads, shared_len) }
            .map_err(|cause| backend.to_error(self.device().id(), attempt(), cause))
    }

    pub(crate) fn raw(&self) -> RawFunction {
        self.raw
    }

    /// Returns the operand that work must hold to run the kernel: its module.
    pub(super) fn operand(&self) -> Operand {
        Arc::<ModuleCore>::clone(&self.module.core)
    }
}
