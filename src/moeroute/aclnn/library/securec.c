/* libc_sec.so: see securec.h. */

#define _GNU_SOURCE
#include "securec.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static int overlap(const void *one, size_t one_size, const void *other, size_t other_size)
{
    uintptr_t a = (uintptr_t)one, b = (uintptr_t)other;
    return a < b + other_size && b < a + one_size;
}

EXPORT errno_t memset_s(void *dest, size_t destMax, int c, size_t count)
{
    if (destMax == 0 || destMax > SECUREC_MEM_MAX_LEN)
        return ERANGE;
    if (dest == NULL)
        return EINVAL;
    memset(dest, c, count < destMax ? count : destMax);
    return count <= destMax ? EOK : ERANGE_AND_RESET;
}

static errno_t copy(void *dest, size_t destMax, const void *src, size_t count, int may_overlap)
{
    errno_t wrong = EOK;
    if (destMax == 0 || destMax > SECUREC_MEM_MAX_LEN)
        return ERANGE;
    if (dest == NULL)
        return EINVAL;
    if (src == NULL)
        wrong = EINVAL_AND_RESET;
    else if (count > destMax)
        wrong = ERANGE_AND_RESET;
    else if (!may_overlap && dest != src && overlap(dest, count, src, count))
        wrong = EOVERLAP_AND_RESET;
    if (wrong)
        memset(dest, 0, destMax);
    else
        memmove(dest, src, count);
    return wrong;
}

EXPORT errno_t memcpy_s(void *dest, size_t destMax, const void *src, size_t count)
{
    return copy(dest, destMax, src, count, 0);
}

EXPORT errno_t memmove_s(void *dest, size_t destMax, const void *src, size_t count)
{
    return copy(dest, destMax, src, count, 1);
}

/* At most `count` characters of the source, behind what the target holds already or in its place. */
static errno_t put(char *dest, size_t destMax, const char *src, size_t count, int append)
{
    errno_t wrong = EOK;
    size_t held = 0, added = 0;
    if (destMax == 0 || destMax > SECUREC_STRING_MAX_LEN)
        return ERANGE;
    if (dest == NULL)
        return EINVAL;
    if (append)
        held = strnlen(dest, destMax);
    if (src != NULL)
        added = strnlen(src, count < destMax ? count : destMax);
    if (src == NULL || held == destMax)
        wrong = EINVAL_AND_RESET;
    else if ((count > SECUREC_STRING_MAX_LEN && count != SIZE_MAX) || held + added >= destMax)
        wrong = ERANGE_AND_RESET;
    else if ((append || dest != src) && overlap(dest, held + added + 1, src, added + (added < count)))
        wrong = EOVERLAP_AND_RESET;
    if (wrong) {
        dest[0] = 0;
    } else {
        memmove(dest + held, src, added);
        dest[held + added] = 0;
    }
    return wrong;
}

EXPORT errno_t strcpy_s(char *strDest, size_t destMax, const char *strSrc)
{
    return put(strDest, destMax, strSrc, SIZE_MAX, 0);
}

EXPORT errno_t strcat_s(char *strDest, size_t destMax, const char *strSrc)
{
    return put(strDest, destMax, strSrc, SIZE_MAX, 1);
}

EXPORT errno_t strncpy_s(char *strDest, size_t destMax, const char *strSrc, size_t count)
{
    return put(strDest, destMax, strSrc, count, 0);
}

EXPORT errno_t strncat_s(char *strDest, size_t destMax, const char *strSrc, size_t count)
{
    return put(strDest, destMax, strSrc, count, 1);
}

/* What vsnprintf says; -1, with an empty string where there is a target, for arguments that are wrong. */
static int print(char *dest, size_t destMax, const char *format, va_list list)
{
    int length = -1;
    if (dest == NULL || destMax == 0 || destMax > SECUREC_STRING_MAX_LEN)
        return -1;
    if (format != NULL)
        length = vsnprintf(dest, destMax, format, list);
    if (length < 0)
        dest[0] = 0;
    return length;
}

EXPORT int vsprintf_s(char *strDest, size_t destMax, const char *format, va_list argList)
{
    int length = print(strDest, destMax, format, argList);
    if (length < 0 || (size_t)length < destMax)
        return length;
    strDest[0] = 0;
    return -1;
}

EXPORT int vsnprintf_s(char *strDest, size_t destMax, size_t count, const char *format, va_list argList)
{
    int length = print(strDest, destMax, format, argList);
    if (length < 0)
        return -1;
    if ((size_t)length > count && count < destMax) {
        strDest[count] = 0;
        return -1;
    }
    if ((size_t)length < destMax)
        return length;
    strDest[0] = 0;
    return -1;
}

EXPORT int vsnprintf_truncated_s(char *strDest, size_t destMax, const char *format, va_list argList)
{
    int length = print(strDest, destMax, format, argList);
    return length < 0 || (size_t)length < destMax ? length : (int)destMax - 1;
}

EXPORT int sprintf_s(char *strDest, size_t destMax, const char *format, ...)
{
    va_list list;
    int length;
    va_start(list, format);
    length = vsprintf_s(strDest, destMax, format, list);
    va_end(list);
    return length;
}

EXPORT int snprintf_s(char *strDest, size_t destMax, size_t count, const char *format, ...)
{
    va_list list;
    int length;
    va_start(list, format);
    length = vsnprintf_s(strDest, destMax, count, format, list);
    va_end(list);
    return length;
}

EXPORT int snprintf_truncated_s(char *strDest, size_t destMax, const char *format, ...)
{
    va_list list;
    int length;
    va_start(list, format);
    length = vsnprintf_truncated_s(strDest, destMax, format, list);
    va_end(list);
    return length;
}

EXPORT char *strtok_s(char *strToken, const char *strDelimit, char **context)
{
    if (strDelimit == NULL || context == NULL || (strToken == NULL && *context == NULL))
        return NULL;
    return strtok_r(strToken, strDelimit, context);
}
