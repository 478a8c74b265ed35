/* moeroute: the bounds-checked C functions that programs for Ascend call (libc_sec.so).
 *
 * destMax is the size of the target in bytes. A function that refuses leaves an empty target where there is one:
 * zeros from the functions of memory, an empty string from those of strings. */
#ifndef MOEROUTE_SECUREC_H
#define MOEROUTE_SECUREC_H

#include <stdarg.h>
#include <stddef.h>

#ifndef errno_t
typedef int errno_t;
#endif

#ifndef EOK
#define EOK 0
#endif
#ifndef EINVAL
#define EINVAL 22
#endif
#ifndef ERANGE
#define ERANGE 34
#endif
#define EINVAL_AND_RESET 150
#define ERANGE_AND_RESET 162
#define EOVERLAP_AND_RESET 182

#define SECUREC_MEM_MAX_LEN 0x7fffffffUL
#define SECUREC_STRING_MAX_LEN 0x7fffffffUL

#if defined(__GNUC__)
#define MOEROUTE_FORMAT(text, first) __attribute__((format(printf, text, first)))
#else
#define MOEROUTE_FORMAT(text, first)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ERANGE where destMax is 0 or above the largest, EINVAL where there is no target; a count above destMax fills the
 * whole target and returns ERANGE_AND_RESET. */
errno_t memset_s(void *dest, size_t destMax, int c, size_t count);

/* EINVAL_AND_RESET without a source, ERANGE_AND_RESET where it is too long, EOVERLAP_AND_RESET where it overlaps. */
errno_t memcpy_s(void *dest, size_t destMax, const void *src, size_t count);
errno_t memmove_s(void *dest, size_t destMax, const void *src, size_t count);
errno_t strcpy_s(char *strDest, size_t destMax, const char *strSrc);
errno_t strcat_s(char *strDest, size_t destMax, const char *strSrc);

/* At most count characters of the source, and a zero behind them. */
errno_t strncpy_s(char *strDest, size_t destMax, const char *strSrc, size_t count);
errno_t strncat_s(char *strDest, size_t destMax, const char *strSrc, size_t count);

/* The number of characters written; -1 with an empty string where they do not fit. */
int sprintf_s(char *strDest, size_t destMax, const char *format, ...) MOEROUTE_FORMAT(3, 4);
int vsprintf_s(char *strDest, size_t destMax, const char *format, va_list argList) MOEROUTE_FORMAT(3, 0);

/* -1 where there were more than count; the first count stay where there is room for them. */
int snprintf_s(char *strDest, size_t destMax, size_t count, const char *format, ...) MOEROUTE_FORMAT(4, 5);
int vsnprintf_s(char *strDest, size_t destMax, size_t count, const char *format, va_list argList)
    MOEROUTE_FORMAT(4, 0);

/* What does not fit is cut off: destMax - 1 then. */
int snprintf_truncated_s(char *strDest, size_t destMax, const char *format, ...) MOEROUTE_FORMAT(3, 4);
int vsnprintf_truncated_s(char *strDest, size_t destMax, const char *format, va_list argList) MOEROUTE_FORMAT(3, 0);

/* As strtok_r; NULL where a pointer is missing. */
char *strtok_s(char *strToken, const char *strDelimit, char **context);

#ifdef __cplusplus
}
#endif

#endif
