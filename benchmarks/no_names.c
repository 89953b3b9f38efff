/* torch's store asks for the name of everybody who connects, on both ends, one after the other. Where a name server is
   slow that takes minutes for thousands of ranks, and hides all else: so addresses are taken for names here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>

typedef int function(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int);

int getnameinfo(const struct sockaddr *address, socklen_t length, char *host, socklen_t host_length, char *service,
                socklen_t service_length, int flags) {
    function *real = (function *)dlsym(RTLD_NEXT, "getnameinfo");
    return real(address, length, host, host_length, service, service_length, flags | NI_NUMERICHOST);
}
