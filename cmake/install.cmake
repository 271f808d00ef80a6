# What `cmake --install --component core` puts where: headers, the static libraries (kvmosaic::kvmosaic, and
# kvmosaic::file for saved sequences), the shared one for C (kvmosaic::c) and the package files that make
# find_package(kvmosaic) work; nothing there needs more than a C++20 compiler, and zstd where kvmosaic::file was built
# with it. The program installs itself
# (tools/CMakeLists.txt).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(kvmosaic_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvmosaic)

install(TARGETS kvmosaic kvmosaic_file kvmosaic_c EXPORT kvmosaicTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT core
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT core NAMELINK_COMPONENT core
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvmosaic DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT core
        FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/include/kvmosaic.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT core)
install(EXPORT kvmosaicTargets NAMESPACE kvmosaic:: DESTINATION ${kvmosaic_package_dir} COMPONENT core)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvmosaicConfig.cmake.in
    ${PROJECT_BINARY_DIR}/kvmosaicConfig.cmake INSTALL_DESTINATION ${kvmosaic_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvmosaicConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvmosaicConfig.cmake ${PROJECT_BINARY_DIR}/kvmosaicConfigVersion.cmake
        DESTINATION ${kvmosaic_package_dir} COMPONENT core)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT core)
