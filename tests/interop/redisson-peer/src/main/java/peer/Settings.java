package peer;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Map;
import org.redisson.config.ClusterServersConfig;
import org.redisson.config.Config;

/**
 * Builds a Redisson configuration. Settings go by Redisson's own names (lockWatchdogTimeout,
 * subscriptionsPerConnection, shardedSubscriptionMode, ...) and are found by reflection, so that
 * one source compiles against versions that do not have all of them.
 */
final class Settings {
    private Settings() {
    }

    /** A setting that this Redisson does not have is an error: a test would rely on it. */
    static Config config(Command command) throws ReflectiveOperationException {
        Config config = new Config();
        String[] urls = command.text("url").split(",");
        Object servers;
        switch (command.text("mode", "single")) {
            case "single":
                servers = config.useSingleServer().setAddress(urls[0]);
                break;
            case "cluster":
                ClusterServersConfig cluster = config.useClusterServers();
                for (String url : urls) {
                    cluster.addNodeAddress(url);
                }
                servers = cluster;
                break;
            default:
                throw new BadCommand("unknown mode " + command.text("mode"));
        }
        if (command.has("watchdogMs")) {
            config.setLockWatchdogTimeout(command.number("watchdogMs"));
        }
        JsonObject settings = command.object("settings");
        for (Map.Entry<String, JsonElement> setting : settings.entrySet()) {
            String name = setting.getKey();
            if (!set(servers, name, setting.getValue()) && !set(config, name, setting.getValue())) {
                throw new BadCommand("this Redisson has no setting " + name);
            }
        }
        return config;
    }

    private static boolean set(Object target, String name, JsonElement value)
            throws ReflectiveOperationException {
        for (Method method : target.getClass().getMethods()) {
            if (method.getName().equalsIgnoreCase("set" + name) && method.getParameterCount() == 1) {
                // 3.8.1 declares most setters in a class that is not public itself.
                method.setAccessible(true);
                try {
                    method.invoke(target, convert(name, value, method.getParameterTypes()[0]));
                    return true;
                } catch (InvocationTargetException e) {
                    throw new BadCommand("setting " + name + ": " + e.getCause().getMessage());
                }
            }
        }
        return false;
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    private static Object convert(String name, JsonElement value, Class<?> type) {
        try {
            if (type == int.class) {
                return value.getAsInt();
            } else if (type == long.class) {
                return value.getAsLong();
            } else if (type == boolean.class) {
                return value.getAsBoolean();
            } else if (type == String.class) {
                return value.getAsString();
            } else if (type.isEnum()) {
                return Enum.valueOf((Class<? extends Enum>) type, value.getAsString());
            }
        } catch (IllegalArgumentException | IllegalStateException | UnsupportedOperationException e) {
            throw new BadCommand("setting " + name + " cannot be " + value);
        }
        throw new BadCommand("setting " + name + " takes a " + type.getSimpleName());
    }
}
