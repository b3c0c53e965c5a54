# find_package(anychip): the header for a chip's C library, as the target anychip::abi.
# `anychip config --cmakedir` says where this is: cmake -Danychip_DIR=$(anychip config --cmakedir)
if(NOT TARGET anychip::abi)
  add_library(anychip::abi INTERFACE IMPORTED)
  get_filename_component(anychip_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
  target_include_directories(anychip::abi INTERFACE "${anychip_INCLUDE_DIR}")
endif()
