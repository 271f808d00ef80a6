# What `cmake --install` puts where. Component "core": headers, static library and the package files that make
# find_package(kvmosaic) work; it needs nothing but a C++20 compiler. Component "program": the kvmosaic program and the
# script behind `kvmosaic fetch`.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(kvmosaic_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvmosaic)

install(TARGETS kvmosaic EXPORT kvmosaicTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT core
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvmosaic DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT core
        FILES_MATCHING PATTERN "*.h")
install(EXPORT kvmosaicTargets NAMESPACE kvmosaic:: DESTINATION ${kvmosaic_package_dir} COMPONENT core)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvmosaicConfig.cmake.in
    ${PROJECT_BINARY_DIR}/kvmosaicConfig.cmake INSTALL_DESTINATION ${kvmosaic_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvmosaicConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvmosaicConfig.cmake ${PROJECT_BINARY_DIR}/kvmosaicConfigVersion.cmake
        DESTINATION ${kvmosaic_package_dir} COMPONENT core)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT core)

if(TARGET kvmosaic_cli)
    install(TARGETS kvmosaic_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
    install(PROGRAMS ${PROJECT_SOURCE_DIR}/scripts/fetch_model.py DESTINATION ${CMAKE_INSTALL_DATADIR}/kvmosaic
            COMPONENT program)
endif()
