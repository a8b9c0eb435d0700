// Access to private members of llama.cpp's classes, which an explicit instantiation may name. If a class changes, this
// fails to compile.
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
