// Private members of llama.cpp's classes by name: an explicit instantiation may name one. Another layout
// of these classes does not compile, instead of going wrong.
#pragma once

namespace pykv {
namespace opened {

template <class Name, typename Name::type Member> struct open {
    friend constexpr typename Name::type member(Name) { return Member; }
};

#define PYKV_OPEN(name, owner, what, ...)                   \
    struct name {                                           \
        using type = __VA_ARGS__;                           \
        friend constexpr type member(name);                 \
    };                                                      \
    template struct open<name, &owner::what>;

}  // namespace opened
}  // namespace pykv
